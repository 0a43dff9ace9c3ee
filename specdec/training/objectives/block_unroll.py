"""`unroll_blocks`: a block-parallel drafter's drafts behind many anchors of a text at once. DFlash, 2602.06036, 3.3.

Each anchor's block sees the target's states of the text before it, and itself. What is drafted at a place of a block
is scored behind the text's own tokens, as `unroll` does it for EAGLE heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.training.objectives.unroll import positions_in, split


@dataclass(frozen=True)
class Place:
    """One place of all blocks: row i is of the block behind token i + 1; rows that are not wanted are 0.

    Attributes:
        read: (B, n, H + r), what `reading_weight` makes logits of. sure: (B, n), the confidence head's; None: it has
            none.
    """

    read: Tensor
    sure: Tensor | None


def reading_weight(head: DFlashHead) -> Tensor:
    """(K, H + r): the LM head's columns, and those that the Markov head adds its bias with."""
    assert head.lm_head is not None
    if head.markov_head is None:
        return head.lm_head.weight
    return torch.cat([head.lm_head.weight, head.markov_head.markov_w2.weight], 1)


def unroll_blocks(
    head: DFlashHead,
    ids: Tensor,
    embed: Callable[[Tensor], Tensor],
    states: Tensor,
    steps: int,
    documents: Tensor | None = None,
    *,
    wanted: Tensor | None = None,
) -> Iterator[Place]:
    """What the head puts out at each place of its blocks, given the true tokens.

    Args:
        ids: (B, T) int64. embed: of tokens (B, n) their embeddings (B, n, H). states: (B, T, taps * target H).
        steps: places. documents: (B, T) int64, texts packed in one row do not see each other.
        wanted: (B, T) bool, row i: a block is drafted behind token i + 1. None: behind all but the first.

    Yields:
        For place j T - 1 - j rows: row i drafts token i + 2 + j.
    """
    documents = torch.zeros_like(ids) if documents is None else documents
    rows, _ = split(None if wanted is None else wanted[:, :-1], documents[:, :-1])
    return unroll_rows(head, ids, embed, states, steps, documents, rows)


def unroll_rows(
    head: DFlashHead,
    ids: Tensor,
    embed: Callable[[Tensor], Tensor],
    states: Tensor,
    steps: int,
    documents: Tensor,
    rows: Tensor,
) -> Iterator[Place]:
    """As `unroll_blocks`, of these rows (B, A) int64. No number in a tensor is looked at."""
    (B, T), c = ids.shape, head.config
    assert c.mask_token_id is not None
    L, n = T - 1, c.block_size
    position = positions_in(documents)
    cache = DynamicCache()
    head.remember(states[:, :L], position[:, :L], cache)
    tokens = torch.full((*rows.shape, n), c.mask_token_id, device=ids.device)
    tokens[..., 0] = ids.gather(1, rows + 1)
    place = torch.arange(n, device=ids.device)
    at = position.gather(1, rows + 1)[..., None] + place  # (B, A, n)
    visible = _visible(c, documents, position, rows + 1, at)
    h = head(embed(tokens.flatten(1)), at.flatten(1), visible, cache).unflatten(1, tokens.shape[1:])
    state = None
    if head.markov_head is not None and not c.from_anchor:
        before = head.markov_head.embedded(tokens[..., 0]).to(h.dtype)
        state = head.markov_head.read(before, h[:, :, 0], None)[1]
    after = torch.nn.functional.pad(ids, (0, n))  # behind the text: never scored
    for step in range(min(steps, c.drafted)):
        read = inputs = h[:, :, n - c.drafted + step]
        if head.markov_head is not None:
            before = head.markov_head.embedded(after.gather(1, rows + 1 + step)).to(h.dtype)
            bias, state = head.markov_head.read(before, read, state)
            read, inputs = torch.cat([read, bias], -1), torch.cat([read, before], -1)
        sure = None
        if head.confidence_head is not None:
            sure = head.confidence_head(inputs[..., : head.confidence_head.proj.in_features])
            sure = sure.new_zeros(B, L).scatter(1, rows, sure)[:, : L - step]
        whole = read.new_zeros(B, L, read.shape[-1]).scatter(1, rows[..., None].expand_as(read), read)
        yield Place(whole[:, : L - step], sure)


def _visible(c: DFlashConfig, documents: Tensor, position: Tensor, anchors: Tensor, at: Tensor) -> list[Tensor]:
    """For each layer, (B, A * n, T - 1 + A * n) bool: of the text what stands before the anchor, and the own block.

    Args:
        documents, position: (B, T). anchors: (B, A) their columns. at: (B, A, n) positions of the blocks' tokens.
    """
    (B, A, n), L = at.shape, documents.shape[1] - 1
    column, block = torch.arange(L, device=at.device), torch.arange(A * n, device=at.device)
    mine = anchors.repeat_interleave(n, 1)[..., None]  # (B, A * n, 1)
    text = (column < mine) & (documents[:, None, :L] == documents.gather(1, mine[..., 0])[..., None])
    own = (block[:, None] // n == block // n).expand(B, -1, -1)
    made: dict[int | None, Tensor] = {None: torch.cat([text, own], -1)}
    for window in {window for window in c.windows if window is not None}:
        first = (at[..., :1].expand_as(at) if c.window_from_anchor else at).flatten(1)[..., None]
        near = text & (position[:, None, :L] >= first - window)
        made[window] = torch.cat([near, own & (block <= block[:, None]) if c.causal_windows else own], -1)
    return [made[window] for window in c.windows]
