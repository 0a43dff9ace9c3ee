"""`DraftNodes`: the draft nodes that the draft model has processed, level by level, with their attention mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftNodes:
    """Nodes that the draft model has processed in this round, M per row, level by level, without the root.

    Attributes:
        tokens: (B, M) int64, the token of each node.
        depth: (B, M) int64, 0 for children of the root. Capped by the row's budget, since positions may run out.
        seen: (B, n, M) bool, the nodes that each of the last level's n nodes attends to, including itself.
        deepest: (B, 1) int64, the largest depth of each row; None: no row's budget is reached.
        dead: (B, n) bool, nodes of the last level that the call's processors ruled out, which are never accepted.
            None: none is known.
        levels: the number of levels.
    """

    tokens: Tensor
    depth: Tensor
    seen: Tensor
    deepest: Tensor | None
    dead: Tensor | None = None
    levels: int = 0

    @classmethod
    def none(cls, root: Tensor, budget: Tensor | None) -> DraftNodes:
        """No nodes after the roots (B,). budget: (B,) int64, tokens to draft; None: no row's budget is reached."""
        nothing = root[:, None][:, :0]
        deepest = None if budget is None else (budget - 1).clamp(min=0)[:, None]
        return cls(nothing, nothing, nothing[..., None].bool(), deepest)

    def and_then(self, tokens: Tensor, parents: Tensor | None, dead: Tensor | None = None) -> DraftNodes:
        """Append a level of n nodes.

        Args:
            tokens: (B, n) int64, the token of each node.
            parents: (B, n) int64, each node's parent, an index into the M nodes, in the last level. None: the parent is
                the last level's only node, or the root.
            dead: (B, n) bool, see `DraftNodes`.
        """
        B, n = tokens.shape
        M, last = self.tokens.shape[1], self.seen.shape[1]
        depth = torch.full_like(tokens, self.levels)
        if self.deepest is not None:
            depth = torch.minimum(depth, self.deepest)
        seen = torch.eye(n, dtype=torch.bool, device=tokens.device).expand(B, n, n)
        if M:
            if parents is None:
                above = self.seen.expand(B, n, M)
            else:
                above = self.seen.gather(1, (parents - (M - last))[..., None].expand(B, n, M))
            seen = torch.cat([above, seen], 2)
        tokens, depth = torch.cat([self.tokens, tokens], 1), torch.cat([self.depth, depth], 1)
        return DraftNodes(tokens, depth, seen, self.deepest, dead, self.levels + 1)
