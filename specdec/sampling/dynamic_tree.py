"""Dynamic draft trees (EAGLE-2, 2406.16858): the most probable candidates are expanded, and the best of all kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sampling.draft_tree import DraftTree


@dataclass(frozen=True)
class DynamicTree:
    """Shape of a dynamic tree, which is grown as in EAGLE-2 (2406.16858, sections 4.1 and 4.2).

    Args:
        depth: maximum depth.
        top_k: nodes expanded per depth, and children of each.
        size: nodes of the final tree, the root included. None: chosen each round by the cost model.

    Raises:
        ValueError: depth or top_k is below 1, or size below 2.

    Examples:
        >>> from specdec import DynamicTree
        >>> DynamicTree(depth=6, top_k=10, size=60).most_nodes
        60
    """

    depth: int = 8
    top_k: int = 8
    size: int | None = None

    LARGEST = 60  # upper bound of an automatic size

    def __post_init__(self) -> None:
        if self.depth < 1 or self.top_k < 1 or (self.size is not None and self.size < 2):
            raise ValueError(f"a tree needs depth >= 1, top_k >= 1 and size >= 2 (or None), got {self}")

    @property
    def most_nodes(self) -> int:
        """Upper bound of the final tree's nodes, the root included."""
        return self.LARGEST if self.size is None else self.size


@dataclass(frozen=True)
class Candidates:
    """The nodes from which a dynamic tree is chosen: P per row, level by level, without the root.

    Works on tensors without a host sync.

    Attributes:
        tokens: (B, P) int64.
        parents: (B, P) int64, indices into these nodes, -1 for children of the root.
        scores: (B, P) float32, the draft's log-probability of the path down to each node.
        levels: number of nodes at each depth.
        level: index of the first node of the last level.
        expanded_nodes: (B, M) int64, the nodes whose children are known.
        newest: number of expanded nodes at the end of `expanded_nodes` that are parents of the last level.

    Examples:
        >>> log_probs = torch.tensor([[[0.6, 0.4]]]).log()
        >>> candidates = Candidates.of_root(torch.tensor([[[7, 8]]]), log_probs)
        >>> nodes, _ = candidates.frontier(width=1)
        >>> candidates = candidates.expanded(nodes, torch.tensor([[[3, 4]]]), torch.tensor([[[0.9, 0.1]]]).log())
        >>> candidates.ranked(2, None).tree(torch.tensor([5]), size=2).tokens  # 5, then 7 (0.6) and 3 (0.54)
        tensor([[5, 7, 3]])
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
        """Candidates that consist of the root's k children: tokens (B, 1, k) int64, log_probs (B, 1, k) float."""
        tokens, scores = tokens[:, 0], log_probs[:, 0].float()
        nobody = torch.full_like(tokens, -1)
        return cls(tokens, nobody, scores, [tokens.shape[1]], 0, tokens[:, :0])

    def level_mass(self) -> Tensor:
        """(B,) float32, the draft's probability that the text continues through a node of the last level."""
        return self.scores[:, self.level :].exp().sum(-1)

    def frontier(self, width: int) -> tuple[Tensor, Tensor | None]:
        """The `width` most probable nodes of the last level, in index order.

        Returns:
            The nodes' indices (B, n) int64, and their parents' positions in `expanded_nodes` (B, n) int64, None for the
            root's children.
        """
        last = self.scores[:, self.level :]
        places = last.topk(min(width, last.shape[1]), -1).indices.sort(-1).values
        if self.level == 0:
            return places, None
        siblings = last.shape[1] // self.newest
        return self.level + places, places // siblings + (self.expanded_nodes.shape[1] - self.newest)

    def expanded(self, nodes: Tensor, tokens: Tensor, log_probs: Tensor) -> Candidates:
        """Add the k children of each of `nodes` (B, n) int64 as a new level: tokens and log_probs are (B, n, k)."""
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

    def ranked(self, most: int, budget: Tensor | None) -> Ranking:
        """Rank the `most` most probable nodes of each row.

        A node is never more probable than its parent and has a higher index. So it always ranks after its parent.

        Args:
            most: nodes to rank.
            budget: (B,) int64, the maximum depth of each row's nodes. None: no limit.
        """
        scores = self.scores
        if budget is not None:
            depths = torch.cat([budget.new_full((count,), depth) for depth, count in enumerate(self.levels, 1)])
            scores = scores.masked_fill(depths > budget[:, None], float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True)
        count = min(most, scores.shape[1])
        return Ranking(self, best.indices[:, :count], best.values[:, :count])


@dataclass(frozen=True)
class Ranking:
    """The most probable candidates of each row in descending order; made by `Candidates.ranked`.

    Attributes:
        candidates: the candidates.
        nodes: (B, R) int64, indices of candidates.
        scores: (B, R) float32, log-probabilities; -inf beyond a row's budget.

    Examples:
        >>> candidates = Candidates.of_root(torch.tensor([[[7, 8]]]), torch.tensor([[[0.25, 0.75]]]).log())
        >>> candidates.ranked(1, None).probabilities()
        tensor([[0.7500]])
    """

    candidates: Candidates
    nodes: Tensor
    scores: Tensor

    def tree(self, root: Tensor, size: int, levels: int | None = None) -> DraftTree:
        """The tree of the first `size` candidates below the root (B,) int64; levels: as in `DraftTree`."""
        B, P = self.candidates.tokens.shape
        nodes = self.nodes[:, :size]
        place = torch.zeros(B, P + 1, dtype=torch.long, device=nodes.device)  # last column: the root
        place.scatter_(1, nodes, torch.arange(1, nodes.shape[1] + 1, device=nodes.device).expand(B, -1))
        above = self.candidates.parents.gather(1, nodes)
        parents = place.gather(1, above.remainder(P + 1))  # -1 becomes the last column
        parents = parents.masked_fill(self.scores[:, :size] == float("-inf"), -1)
        tokens = torch.cat([root[:, None], self.candidates.tokens.gather(1, nodes)], 1)
        return DraftTree(tokens, torch.nn.functional.pad(parents, (1, 0), value=-1), levels=levels)

    def probabilities(self) -> Tensor:
        """(B, R) float32, the draft's probability of the path down to each ranked node."""
        return self.scores.exp()

    def steps(self, size: int) -> Tensor:
        """(B, 1 + size) int64, the position in `expanded_nodes` of each node of `tree`; -1 if it was not expanded."""
        expanded = self.candidates.expanded_nodes
        same = self.nodes[:, :size, None] == expanded[:, None]  # (B, size, M)
        number = torch.arange(1, expanded.shape[1] + 1, device=expanded.device)
        return torch.nn.functional.pad((same * number).sum(-1) - 1, (1, 0), value=-1)
