"""`DraftNodes`: the draft nodes that the draft model has processed, level by level, with their attention mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftNodes:
    """Nodes that the draft model has processed in this round, M per row, level by level, without the root.

    Attributes:
        by_level: (B, n) int64 each, the tokens of each level, after an empty one for the root.
        depth: (B, M) int64, 0 for children of the root. Capped by the row's budget, since positions may run out. Those
            of a chain are known from the start, of all nodes that it may get.
        seen: (B, n, M) bool, the nodes that each of the last level's n nodes attends to, including itself. None for a
            chain: all of them.
        deepest: (B, 1) int64, the largest depth of each row; None: no row's budget is reached.
        dead: (B, n) bool, nodes of the last level that the call's processors ruled out, which are never accepted.
            None: none is known.
        parents: (B, n) int64, the parent of each node of the last level, an index into the M nodes. None: the last
            level's only node before it, or the root.
    """

    by_level: tuple[Tensor, ...]
    depth: Tensor
    seen: Tensor | None
    deepest: Tensor | None
    dead: Tensor | None = None
    parents: Tensor | None = None

    @classmethod
    def none(cls, root: Tensor, budget: Tensor | None) -> DraftNodes:
        """No nodes after the roots (B,). budget: (B,) int64, tokens to draft; None: no row's budget is reached."""
        nothing = root[:, None][:, :0]
        deepest = None if budget is None else (budget - 1).clamp(min=0)[:, None]
        return cls((nothing,), nothing, nothing[..., None].bool(), deepest)

    @classmethod
    def chain(cls, root: Tensor, budget: Tensor | None, limit: int) -> DraftNodes:
        """No nodes of a chain of at most `limit`; the other arguments as for `none`."""
        depth = torch.arange(limit, device=root.device).expand(len(root), limit)
        if budget is not None:
            depth = torch.minimum(depth, (budget - 1).clamp(min=0)[:, None])
        return cls((root[:, None][:, :0],), depth, None, None)

    @property
    def is_chain(self) -> bool:
        """True for nodes begun with `chain`."""
        return self.seen is None

    @property
    def levels(self) -> int:
        """The number of levels."""
        return len(self.by_level) - 1

    @property
    def newest(self) -> Tensor:
        """(B, n) int64, the tokens of the last level."""
        return self.by_level[-1]

    @cached_property
    def tokens(self) -> Tensor:
        """(B, M) int64, the token of each node."""
        return torch.cat(self.by_level, 1)

    def paths(self, b: int) -> list[Tensor]:
        """The tokens after the root down to each of the last level's nodes in row b, (d,) int64 each."""
        return [self.tokens[b]] if self.seen is None else [self.tokens[b, seen] for seen in self.seen[b]]

    def and_then(self, tokens: Tensor, parents: Tensor | None, dead: Tensor | None = None) -> DraftNodes:
        """Append a level of n nodes.

        Args:
            tokens: (B, n) int64, the token of each node.
            parents: (B, n) int64, see `DraftNodes`; in the last level.
            dead: (B, n) bool, see `DraftNodes`.
        """
        by_level = (*self.by_level, tokens)
        if self.seen is None:
            return DraftNodes(by_level, self.depth, None, None, dead)
        (B, n), M, last = tokens.shape, self.depth.shape[1], self.seen.shape[1]
        level = torch.full_like(tokens, self.levels) if self.deepest is None else self.deepest.clamp(max=self.levels)
        # The last level's columns of its own mask are an identity matrix.
        itself = self.seen[..., M - n :] if M and n == last else torch.eye(n, dtype=torch.bool, device=tokens.device)
        seen = itself.expand(B, n, n)
        if M:
            if parents is None:
                above = self.seen.expand(B, n, M)
            else:
                above = self.seen.gather(1, (parents - (M - last))[..., None].expand(B, n, M))
            seen = torch.cat([above, seen], 2)
        depth = torch.cat([self.depth, level.expand(B, n)], 1)
        return DraftNodes(by_level, depth, seen, self.deepest, dead, parents)
