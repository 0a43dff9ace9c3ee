"""Trees of one shape in every row: choosing children, and cutting what a row has no room for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.proposers.base import Context
from specdec.sampling.draft_tree import DraftTree
from specdec.utils.device_copies import uploaded


def top(probs: Tensor, width: int) -> Tensor:
    """(..., width) most probable tokens of (..., V) probs; -1 where fewer have a probability."""
    top = probs.topk(min(width, probs.shape[-1]), -1)
    chosen = torch.where(top.values > 0, top.indices, -1)
    return nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1)


def draw_without_replacement(probs: Tensor, width: int) -> Tensor:
    """(..., width) tokens of (..., V) probs, in the order successive draws without replacement give them.

    Gumbel top-k (Kool et al. 1903.06059). Where fewer than `width` tokens have a probability, -1 fills up.
    """
    noise = torch.empty_like(probs).exponential_()
    top = (probs / noise).topk(min(width, probs.shape[-1]), -1)
    drawn = torch.where(top.values > 0, top.indices, -1)
    return nn.functional.pad(drawn, (0, width - drawn.shape[-1]), value=-1)


def fitted(
    context: Context, tokens: Tensor, parents: Sequence[int], depth: Sequence[int], q: Tensor | None
) -> DraftTree:
    """The tree with each row cut to its room, and children that could not be drawn (-1) taken out."""
    B = len(tokens)
    fits = [[level <= most for level in depth] for most in context.drafting_budget]
    shape, fitting = uploaded([[list(parents)] * B, fits], tokens.device)
    above, below = uploaded(_relatives(parents), tokens.device).bool()  # (N, N) each
    possible = fitting.bool() & (tokens >= 0)
    keep = (possible[:, None] | ~above).all(-1)  # a node goes with its parent
    if q is not None:  # where children were cut off nothing was drawn
        q = q * (keep[:, None] & below).any(-1)[..., None]
    return DraftTree(tokens.clamp(min=0), shape.masked_fill(~keep, -1), q, levels=max(depth))


def _relatives(parents: Sequence[int]) -> list[list[list[int]]]:
    """For each node, which nodes are itself or above it; for each node, which are its children."""
    above = [[0] * len(parents) for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            above[node] = list(above[parent])
        above[node][node] = 1
    return [above, [[int(parent == node) for parent in parents] for node in range(len(parents))]]
