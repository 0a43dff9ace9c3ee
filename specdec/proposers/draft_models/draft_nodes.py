"""`Stepped`: the nodes of a draft that what drafts was run over, level by level, and what each of them sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stepped:
    """The nodes that the draft model was run over in this round, M per row, level by level; the root is not among them.

    Attributes:
        tokens: (B, M) int64. depth: (B, M) int64, 0 for children of the root; no more than a row has room for, as
            positions may run out.
        seen: (B, n, M) bool, which of them each of the last level's n sees, itself included.
        deepest: (B, 1) int64, each row's largest depth; None: there is room for whatever is drafted.
        dead: (B, n) bool, of the last level, nodes that the call's processors ruled out: never reached, whatever comes
            of them; None: none of them is known to be.
        levels: how many there are.
    """

    tokens: Tensor
    depth: Tensor
    seen: Tensor
    deepest: Tensor | None
    dead: Tensor | None = None
    levels: int = 0

    @classmethod
    def none(cls, root: Tensor, budget: Tensor | None) -> Stepped:
        """Behind the roots (B,), with room for so many more tokens (B,); None: for whatever is drafted."""
        nothing = root[:, None][:, :0]
        deepest = None if budget is None else (budget - 1).clamp(min=0)[:, None]
        return cls(nothing, nothing, nothing[..., None].bool(), deepest)

    def and_then(self, tokens: Tensor, parents: Tensor | None, dead: Tensor | None = None) -> Stepped:
        """With n more nodes, a level of their own.

        Args:
            tokens: (B, n) int64. parents: (B, n) indices into these nodes, of the last level; None: each is the child
                of the only node there, or of the root.
            dead: (B, n) bool.
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
        return Stepped(tokens, depth, seen, self.deepest, dead, self.levels + 1)
