"""Teacher-forced drafts of a block drafter after many anchors of a text at once (DFlash, 2602.06036, section 3.3).

Each anchor's block attends to the target's states of the text before the anchor, and to itself. The draft at each
position of a block is scored given the text's own tokens, as `unroll` does it for EAGLE heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import DynamicCache

from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.training.objectives.unroll import Drafted, positions_in, split


def lm_head_weight(head: DFlashHead) -> Tensor:
    """Return the matrix of all draft logits, (K, H + r): the LM head's columns, then the Markov head's."""
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
) -> Iterator[Drafted]:
    """Compute the head's output at each position of its blocks, given the true tokens.

    Args:
        head: block drafter.
        ids: (B, T) int64.
        embed: maps tokens (B, n) to embeddings (B, n, H).
        states: see `unroll`.
        steps: positions per block.
        documents: see `unroll`.
        wanted: (B, T) bool; at row i: a block is drafted after token i + 1. None: after all but the first.

    Yields:
        For position j, T - 1 - j rows. Row i drafts token i + 2 + j; it is 0 unless it is wanted. `lm_head_weight` maps
        `Drafted.hidden` to logits.
    """
    documents = torch.zeros_like(ids) if documents is None else documents
    rows, _ = split(None if wanted is None else wanted[:, :-1], documents[:, :-1])
    (B, T), c = ids.shape, head.config
    assert c.mask_token_id is not None
    L, n = T - 1, c.block_size
    position = positions_in(documents)
    cache = DynamicCache()
    head.append_kv(states[:, :L], position[:, :L], cache)
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
    after = torch.nn.functional.pad(ids, (0, n))  # the padding after the text is never scored
    for step in range(min(steps, c.drafted)):
        read = inputs = h[:, :, n - c.drafted + step]
        if head.markov_head is not None:
            before = head.markov_head.embedded(after.gather(1, rows + 1 + step)).to(h.dtype)
            bias, state = head.markov_head.read(before, read, state)
            read, inputs = torch.cat([read, bias], -1), torch.cat([read, before], -1)
        acceptance = None
        if head.confidence_head is not None:
            acceptance = head.confidence_head(inputs[..., : head.confidence_head.proj.in_features])
            acceptance = acceptance.new_zeros(B, L).scatter(1, rows, acceptance)[:, : L - step]
        whole = read.new_zeros(B, L, read.shape[-1]).scatter(1, rows[..., None].expand_as(read), read)
        yield Drafted(whole[:, : L - step], acceptance)


def _visible(c: DFlashConfig, documents: Tensor, position: Tensor, anchors: Tensor, at: Tensor) -> list[Tensor]:
    """Attention mask of each layer, (B, A * n, T - 1 + A * n) bool: the text before the anchor, and the own block.

    documents and position (B, T) are those of the text; anchors (B, A) its columns; at (B, A, n) the blocks' positions.
    """
    (B, A, n), L = at.shape, documents.shape[1] - 1
    column, block = torch.arange(L, device=at.device), torch.arange(A * n, device=at.device)
    mine = anchors.repeat_interleave(n, 1)[..., None]  # (B, A * n, 1)
    text = (column < mine) & (documents[:, None, :L] == documents.gather(1, mine[..., 0])[..., None])
    own = (block[:, None] // n == block // n).expand(B, -1, -1)
    masks: dict[int | None, Tensor] = {}
    for window in set(c.windows):
        first = (at[..., :1].expand_as(at) if c.window_from_anchor else at).flatten(1)[..., None]
        near = text if window is None else text & (position[:, None, :L] >= first - window)
        masks[window] = torch.cat([near, own & (block <= block[:, None]) if c.is_causal(window) else own], -1)
    return [masks[window] for window in c.windows]
