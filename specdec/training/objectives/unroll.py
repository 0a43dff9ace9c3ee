"""Teacher-forced drafts of an EAGLE head after every position of a text at once, for training and simulation.

This is the training-time test of EAGLE-3 (2503.01840, section 3.2). Step 0 reads the target's states; step j reads the
head's own output of step j - 1 instead. A row of step j attends to the keys of step 0 up to its position, and to its
own keys of each step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import DynamicCache

from specdec.heads.eagle3.head import Eagle3Head

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, attention head, query, key) -> True if visible


@dataclass(frozen=True)
class Drafted:
    """Drafts of one step after many tokens, before their logits are computed.

    Attributes:
        hidden: (B, n, W), input of the LM head. Row i drafts token i + 2 + step.
        acceptance: (B, n) float32, probability of acceptance by the confidence head; None without one.
    """

    hidden: Tensor
    acceptance: Tensor | None = None


def unroll(
    head: Eagle3Head,
    embeds: Tensor,
    states: Tensor,
    steps: int,
    documents: Tensor | None = None,
    *,
    wanted: Tensor | None = None,
    flex: bool = False,
) -> Iterator[Tensor]:
    """Compute the head's output at each step, given the true tokens.

    Args:
        head: EAGLE-3 head.
        embeds: (B, T, E), embeddings of the text's tokens 0 to T - 1.
        states: (B, T, taps * target H), the target's states of the same tokens.
        steps: drafted tokens.
        documents: (B, T) int64, text number of each token. Texts packed in one row do not see each other.
        wanted: (B, T) bool, rows whose output is used. A head with one layer computes only keys and values for the
            others. None: all.
        flex: use flex attention, which skips masked blocks and keeps no scores. It is fast on CUDA only. False: use a
            dense mask, (B, rows, T + (steps - 1) * rows) at the last step.

    Yields:
        For step j, (B, T - 1 - j, H). Row i drafts token i + 2 + j, given true states up to token i and true tokens up
        to i + 1 + j. Rows that are not wanted may be 0.
    """
    B, T = embeds.shape[:2]
    L = T - 1  # rows: the last token has no successor to pair with
    documents = embeds.new_zeros(B, T, dtype=torch.long) if documents is None else documents
    documents = documents[:, :L]
    position = positions_in(documents)
    features = head.fuse(states[:, :L])
    cache = DynamicCache()
    rows, others = split(None if wanted is None or flex or not head.can_append_kv else wanted[:, :L], position)
    if others.shape[1]:
        head.append_kv(_at(embeds[:, 1:], others), _at(features, others), position.gather(1, others), cache)
    features = _at(features, rows)
    keys, n = torch.cat([others, rows], 1), rows.shape[1]  # keys: the row of each key; steps_of: its step
    steps_of = torch.zeros_like(keys[0])
    for step in range(steps):
        shifted = torch.nn.functional.pad(embeds[:, 1 + step :], (0, 0, 0, step))  # padding after the text: not scored
        sees = _mask(documents, position, rows, keys, steps_of, step, head.config.sliding_window)
        visible: Tensor | BlockMask
        if flex:
            visible = create_block_mask(sees, B, None, n, keys.shape[1], device=str(embeds.device))
        else:
            b, q, k = (torch.arange(size, device=embeds.device) for size in (B, n, keys.shape[1]))
            visible = sees(b[:, None, None], b[:1], q[:, None], k)
        features = head(_at(shifted, rows), features, position.gather(1, rows) + step, visible, cache)
        whole = features.new_zeros(B, L, features.shape[-1])
        yield whole.scatter(1, rows[..., None].expand_as(features), features)[:, : L - step]
        keys = torch.cat([keys, rows], 1)
        steps_of = torch.nn.functional.pad(steps_of, (0, n), value=step + 1)


def positions_in(documents: Tensor) -> Tensor:
    """Return the position of each token in its text, (B, T) int64."""
    row = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return row - (row * begins).cummax(-1).values


def split(wanted: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the rows to compute (B, n) and of the others (B, L - n), ascending."""
    L = like.shape[1]
    if wanted is None:
        rows = torch.arange(L, device=like.device).expand_as(like)
        return rows, rows[:, :0]
    n = max(1, int(wanted.sum(-1).max()))  # batch entries that want fewer are filled up with other rows
    order = (~wanted).byte().argsort(dim=-1, stable=True)
    return order[:, :n].sort(-1).values, order[:, n:].sort(-1).values


def _at(x: Tensor, rows: Tensor) -> Tensor:
    """Gather rows (B, n) of x (B, L, H) as (B, n, H)."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def _mask(
    documents: Tensor, position: Tensor, rows: Tensor, keys: Tensor, steps_of: Tensor, step: int, window: int | None
) -> Mask:
    """Attention mask: keys of step 0 up to the query's row, and of each later step the query's own key.

    Rows (B, n) of the queries at `step`, and keys (B, K) at `steps_of` (K,), are rows of documents and position (B, L).
    """

    def sees(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        mine, theirs, earlier = rows[b, q], keys[b, k], steps_of[k]
        before = (theirs <= mine) & (documents[b, theirs] == documents[b, mine])
        visible = torch.where(earlier == 0, before, theirs == mine)
        if window is None:
            return visible
        return visible & (position[b, mine] + step - position[b, theirs] - earlier < window)

    return sees
