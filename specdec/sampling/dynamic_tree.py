"""Dynamic draft trees (EAGLE-2, 2406.16858): candidates are expanded by probability, and the most probable are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sampling.draft_tree import DraftTree


@dataclass(frozen=True)
class DynamicTree:
    """How a dynamic tree is grown: EAGLE-2 (2406.16858), sections 4.1 and 4.2.

    Args:
        depth: of the deepest nodes, at most. top_k: nodes expanded per depth, and children of each.
        size: nodes of the final tree, the root included; None: as many as pay, by the measured cost of target passes.
    """

    depth: int = 8
    top_k: int = 8
    size: int | None = None

    LARGEST = 60  # of an automatic size

    def __post_init__(self) -> None:
        if self.depth < 1 or self.top_k < 1 or (self.size is not None and self.size < 2):
            raise ValueError(f"a tree needs depth >= 1, top_k >= 1 and size >= 2 (or None), got {self}")

    @property
    def most_nodes(self) -> int:
        return self.LARGEST if self.size is None else self.size


@dataclass(frozen=True)
class Candidates:
    """The nodes from which a dynamic tree is chosen, P per row, level by level, the root not among them.

    All tensor work, without a look at any value: a device is not waited for.

    Attributes:
        tokens: (B, P) int64. parents: (B, P) int64, indices into these nodes, -1 for children of the root.
        scores: (B, P) float32, the draft's log-probability of the path down to each node.
        levels: how many of the P nodes lie at each depth. level: index of the last level's first node.
        expanded_nodes: (B, M) int64, those whose children are known. newest: of these, the last level's parents.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    levels: list[int]
    level: int
    expanded_nodes: Tensor
    newest: int = 0

    @classmethod
    def of_root(cls, tokens: Tensor, log_probs: Tensor) -> Candidates:
        """The root's children: tokens and log_probs (B, 1, k)."""
        tokens, scores = tokens[:, 0], log_probs[:, 0].float()
        nobody = torch.full_like(tokens, -1)
        return cls(tokens, nobody, scores, [tokens.shape[1]], 0, tokens[:, :0])

    def level_mass(self) -> Tensor:
        """(B,) the draft's probability that the text goes on through the last level."""
        return self.scores[:, self.level :].exp().sum(-1)

    def frontier(self, width: int) -> tuple[Tensor, Tensor | None]:
        """The last level's `width` most probable nodes, in their order.

        Returns:
            their indices (B, n), and their parents' places among `expanded_nodes` (B, n); None for the root's children.
        """
        last = self.scores[:, self.level :]
        places = last.topk(min(width, last.shape[1]), -1).indices.sort(-1).values
        if self.level == 0:
            return places, None
        siblings = last.shape[1] // self.newest
        return self.level + places, places // siblings + (self.expanded_nodes.shape[1] - self.newest)

    def expanded(self, nodes: Tensor, tokens: Tensor, log_probs: Tensor) -> Candidates:
        """With the children of `nodes` (B, n) as a further level: tokens and log_probs (B, n, k)."""
        B, n, k = tokens.shape

        def per_child(of_parent: Tensor) -> Tensor:
            return of_parent[..., None].expand(B, n, k).flatten(1)

        scores = (self.scores.gather(1, nodes)[..., None] + log_probs.float()).flatten(1)
        return Candidates(
            tokens=torch.cat([self.tokens, tokens.flatten(1)], 1),
            parents=torch.cat([self.parents, per_child(nodes)], 1),
            scores=torch.cat([self.scores, scores], 1),
            levels=[*self.levels, n * k],
            level=self.tokens.shape[1],
            expanded_nodes=torch.cat([self.expanded_nodes, nodes], 1),
            newest=n,
        )

    def ranked(self, most: int, room: Tensor | None) -> Ranking:
        """The `most` most probable nodes of each row, no deeper than its room (B,); None: there is room for all.

        A node is never more probable than its parent and never before it, so each comes after its parent.
        """
        scores = self.scores
        if room is not None:
            depths = torch.cat([room.new_full((count,), depth) for depth, count in enumerate(self.levels, 1)])
            scores = scores.masked_fill(depths > room[:, None], float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True)
        count = min(most, scores.shape[1])
        return Ranking(self, best.indices[:, :count], best.values[:, :count])


@dataclass(frozen=True)
class Ranking:
    """The best candidates of each row, the most probable first.

    Attributes:
        nodes: (B, R) int64 indices of candidates. scores: (B, R) float32 log-probabilities, -inf beyond a row's room.
    """

    candidates: Candidates
    nodes: Tensor
    scores: Tensor

    def tree(self, root: Tensor, size: int, levels: int | None = None) -> DraftTree:
        """The first `size` of them behind the root (B,); levels: depths that there are, if known."""
        B, P = self.candidates.tokens.shape
        nodes = self.nodes[:, :size]
        place = torch.zeros(B, P + 1, dtype=torch.long, device=nodes.device)  # the last column: the root's
        place.scatter_(1, nodes, torch.arange(1, nodes.shape[1] + 1, device=nodes.device).expand(B, -1))
        above = self.candidates.parents.gather(1, nodes)
        parents = place.gather(1, above.remainder(P + 1))  # -1 is the last column
        parents = parents.masked_fill(self.scores[:, :size] == float("-inf"), -1)
        tokens = torch.cat([root[:, None], self.candidates.tokens.gather(1, nodes)], 1)
        return DraftTree(tokens, torch.nn.functional.pad(parents, (1, 0), value=-1), levels=levels)

    def probabilities(self) -> Tensor:
        """(B, R) float32, the draft's probability of the path down to each of them."""
        return self.scores.exp()

    def steps(self, size: int) -> Tensor:
        """(B, 1 + size) int64, for each node of `tree` its place among the expanded candidates; -1 for the others."""
        expanded = self.candidates.expanded_nodes
        same = self.nodes[:, :size, None] == expanded[:, None]  # (B, size, M)
        number = torch.arange(1, expanded.shape[1] + 1, device=expanded.device)
        return torch.nn.functional.pad((same * number).sum(-1) - 1, (1, 0), value=-1)
