"""Trees of a fixed shape: choosing children, and cutting each row's tree to its budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.proposers.context import Context
from specdec.sampling.draft_tree import DraftTree
from specdec.utils.device_copies import uploaded


def top(probs: Tensor, width: int) -> Tensor:
    """The `width` most probable tokens (..., width) of probs (..., V); -1 where fewer have a positive probability."""
    top = probs.topk(min(width, probs.shape[-1]), -1)
    chosen = torch.where(top.values > 0, top.indices, -1)
    return nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1)


def draw_without_replacement(probs: Tensor, width: int) -> Tensor:
    """Draw tokens (..., width) from probs (..., V) without replacement, in the order of successive draws.

    Uses Gumbel top-k (Kool et al., arXiv 1903.06059). -1 where fewer tokens have a positive probability.
    """
    noise = torch.empty_like(probs).exponential_()
    top = (probs / noise).topk(min(width, probs.shape[-1]), -1)
    drawn = torch.where(top.values > 0, top.indices, -1)
    return nn.functional.pad(drawn, (0, width - drawn.shape[-1]), value=-1)


def fitted(
    context: Context, tokens: Tensor, parents: Sequence[int], depth: Sequence[int], q: Tensor | None
) -> DraftTree:
    """Build the tree, with each row cut to its budget and without children that could not be drawn (-1).

    Args:
        context: the state of the batch.
        tokens: (B, N) int64, the root first.
        parents: the index of each node's parent, the same in every row; -1 for the root.
        depth: the depth of each node; 0 for the root.
        q: (B, N, V) float32, the distributions that children were drawn from; None: deterministic.
    """
    B = len(tokens)
    fits = [[level <= most for level in depth] for most in context.drafting_budget]
    shape, fitting = uploaded([[list(parents)] * B, fits], tokens.device)
    above, below = uploaded(_relatives(parents), tokens.device).bool()  # (N, N) each
    possible = fitting.bool() & (tokens >= 0)
    keep = (possible[:, None] | ~above).all(-1)  # a node is removed together with its parent
    if q is not None:  # nodes whose children were all cut have drawn nothing
        q = q * (keep[:, None] & below).any(-1)[..., None]
    return DraftTree(tokens.clamp(min=0), shape.masked_fill(~keep, -1), q, levels=max(depth))


def _relatives(parents: Sequence[int]) -> list[list[list[int]]]:
    """Two (N, N) 0/1 tables: the ancestors of each node, including itself, and the children of each node."""
    above = [[0] * len(parents) for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            above[node] = list(above[parent])
        above[node][node] = 1
    return [above, [[int(parent == node) for parent in parents] for node in range(len(parents))]]
