"""`DraftTree`: what a proposer drafted for every row, as one tree of tokens per row.

Owns the tree's shape: parents, depth, ancestors. Knows nothing of models, caches or probabilities' meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from specdec.outcome import Outcome


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens of B rows as trees of N nodes each (padded to the widest row).

    Node 0 is the *root*: the row's last token, chosen but not yet in the target's cache. A node's parent always
    comes before it. A row with nothing to draft is a root alone; its other nodes are padding.

    Args:
        tokens: (B, N) int64, the token at each node.
        parents: (B, N) int64, the index of each node's parent; -1 for the root and for padding.
        probs: (B, N, V) float32 or None. Row n is q(. | path to n), the draft's distribution from which the
            children of node n were *drawn* (in index order, without replacement); all zeros where nothing was drawn.
            None says that every node was chosen deterministically: its proposal is a point mass.
        chain: every node has at most one child and node n's parent is n - 1.
        keys: optional (B, N) int64 labels of how sure the proposer was of each node, for `pacing.Acceptance`.
        levels: how deep the deepest node may lie, if whoever made the tree knows: else it has to be looked up.
        notes: (B, n) int64 or float32 tensors that the proposer wants to read when the round is over: they come to the
            host with the verdict (`outcome.Outcome.notes`), in the round's one copy.
    """

    tokens: Tensor
    parents: Tensor
    probs: Tensor | None = None
    chain: bool = False
    keys: Tensor | None = None
    levels: int | None = None
    notes: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens.shape != self.parents.shape or self.tokens.dim() != 2:
            raise ValueError(
                f"DraftTree needs tokens and parents of one shape (B, N), got {tuple(self.tokens.shape)} and "
                f"{tuple(self.parents.shape)}"
            )

    @classmethod
    def root_only(cls, root: Tensor) -> DraftTree:
        """The empty draft: `root` (B,) int64 and nothing behind it. Verifying it is plain decoding."""
        return cls(root[:, None], root.new_full((len(root), 1), -1), chain=True)

    @classmethod
    def from_chain(
        cls,
        root: Tensor,
        drafts: Tensor,
        lengths: Tensor | None = None,
        probs: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> DraftTree:
        """One continuation per row.

        Args:
            root: (B,) int64, on any device.
            drafts: (B, K) int64, row b's first `lengths[b]` entries count.
            lengths: (B,) int64, or None when every row has K.
            probs: (B, K, V) float32, probs[:, i] is the q that drafts[:, i] was drawn from; None: deterministic.
            keys: (B, K) int64 confidence labels of the drafts.
        """
        B, K = drafts.shape
        tokens = torch.cat([root[:, None].to(drafts.device), drafts], dim=1)  # (B, K + 1)
        parents = torch.arange(-1, K, device=drafts.device).expand(B, K + 1)
        if lengths is not None:
            index = torch.arange(K + 1, device=drafts.device)
            parents = parents.masked_fill(index > lengths[:, None], -1)
        if probs is not None:
            probs = torch.cat([probs, torch.zeros_like(probs[:, :1])], dim=1)  # nothing drawn at the last node
            if lengths is not None:  # nor at any row's own last node
                probs = probs.masked_fill((index >= lengths[:, None])[..., None], 0.0)
        if keys is not None:
            keys = torch.cat([torch.zeros_like(keys[:, :1]), keys], dim=1)
        return cls(tokens, parents.contiguous(), probs, chain=True, keys=keys)

    def first(self, size: int) -> DraftTree:
        """The first `size` nodes, the root included: parents come before their children."""
        probs = None if self.probs is None else self.probs[:, :size]
        keys = None if self.keys is None else self.keys[:, :size]
        return replace(self, tokens=self.tokens[:, :size], parents=self.parents[:, :size], probs=probs, keys=keys)

    @property
    def size(self) -> int:
        """N, the root included."""
        return self.tokens.shape[1]

    @cached_property
    def valid(self) -> Tensor:
        """(B, N) bool, False for padding."""
        index = torch.arange(self.size, device=self.parents.device)
        return (self.parents >= 0) | (index == 0)

    @cached_property
    def ancestors(self) -> Tensor:
        """(B, N, N) bool, [b, i, j]: node j is node i or one of its ancestors."""
        N = self.size
        index = torch.arange(N, device=self.tokens.device)
        if self.chain:
            at_or_before = index <= index[:, None]
            return (at_or_before & self.valid[..., None]) | (index == index[:, None])
        itself_or_parent = (index == index[:, None]) | (index == self.parents[..., None])  # padding's parent is -1
        reach = itself_or_parent.float()
        # Squaring the reachability matrix doubles the distance it covers: log2 of the depth products, not as many.
        farthest = N - 1 if self.levels is None else self.levels
        for _ in range((farthest - 1).bit_length() if farthest > 1 else 0):
            reach = (reach @ reach).clamp(max=1)
        return reach > 0

    @cached_property
    def depth(self) -> Tensor:
        """(B, N) int64, distance from the root; 0 for padding."""
        if self.chain:
            return torch.arange(self.size, device=self.tokens.device) * self.valid
        return self.ancestors.sum(-1) - 1

    @cached_property
    def height(self) -> int:
        """Depth of the deepest node, or what it may be at most."""
        if self.chain:
            return self.size - 1
        return int(self.depth.max()) if self.levels is None else min(self.levels, self.size - 1)

    def child(self, node: Tensor, token: Tensor) -> Tensor:
        """(B,) int64, the child of each row's node (B,) that carries its token (B,); -1 where there is none."""
        hit = (self.parents == node[:, None]) & (self.tokens == token[:, None])  # (B, N)
        return torch.where(hit.any(-1), hit.long().argmax(-1), -1)

    def children(self) -> Tensor:
        """(B, N, C) int64, each node's children in index order, -1 where there are fewer than C."""
        B, N = self.tokens.shape
        is_child = self.parents[:, None, :] == torch.arange(N, device=self.tokens.device)[:, None]  # (B, N, N)
        rank = is_child.cumsum(-1) - 1  # a child's place among its siblings
        width = max(1, int(is_child.sum(-1).max()))
        out = self.parents.new_full((B, N, width + 1), -1)  # last column takes what is no child
        index = torch.arange(N, device=self.tokens.device).expand(B, N, N)
        out.scatter_(2, torch.where(is_child, rank, width), index)
        return out[..., :width]


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


@dataclass(frozen=True)
class Verdict:
    """What a verification rule decided for every row.

    Args:
        path: (B, D) int64, node indices from the root (column 0) down the accepted path; beyond a row's accepted
            length each column holds its own index, so that moving "node path[d] to place d" is a no-op there.
        accepted: (B,) int64, number of accepted draft nodes (the root not counted), < D.
        next_token: (B,) int64, the token after the path: the bonus token if the whole path was accepted, else the
            recovered one. Each row thus gains `accepted + 1` tokens.
        outcome: the same on the host, once the loop has it: `outcome.Outcome`.
    """

    path: Tensor
    accepted: Tensor
    next_token: Tensor
    outcome: Outcome | None = None

    def new_tokens(self, tree: DraftTree) -> Tensor:
        """(B, D) int64: the accepted tokens, then `next_token`; row b's first `accepted[b] + 1` entries count."""
        accepted_tokens = tree.tokens.gather(1, self.path)[:, 1:]  # (B, D - 1)
        tokens = torch.cat([accepted_tokens, self.next_token[:, None]], dim=1)
        return tokens.scatter(1, self.accepted[:, None], self.next_token[:, None])
