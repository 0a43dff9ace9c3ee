"""`DraftTree`: the tokens drafted in a round, one tree per row, and its shape (parents, depth, ancestors)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from specdec.utils.device_copies import moved
from specdec.utils.moved import renamed_argument, warn_of_old_name


@renamed_argument("keys", "confidence_bins")
@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens of B rows, as trees of N nodes each (padded to the widest row).

    Node 0 is the *root*: the row's last token, chosen but not yet in the target's cache. A node's parent always
    comes before it. A row without a draft has a root only; its other nodes are padding.

    Args:
        tokens: (B, N) int64, the token at each node.
        parents: (B, N) int64, the index of each node's parent; -1 for the root and for padding.
        probs: (B, N, V) float32. Entry n is q(. | path to n), the draft's distribution from which the children of
            node n were *drawn* (in index order, without replacement); all zeros where nothing was drawn.
            None: every node was chosen deterministically, q is a point mass.
        chain: True if every node has at most one child and node n's parent is n - 1.
        confidence_bins: (B, N) int64, the bin of the proposer's confidence in each node, for the pacing.
        levels: upper bound of the deepest node's depth. None: computed from `parents`, which takes a host sync.
        notes: (B, n) int64 or float32 tensors by name, for the proposer to read after the round. They reach the host
            together with the result (`HostResult.notes`), in the round's one copy.

    Raises:
        ValueError: tokens and parents differ in shape, or are not (B, N).

    Examples:
        >>> from specdec import DraftTree
        >>> tree = DraftTree(tokens=torch.tensor([[5, 7, 8, 9]]), parents=torch.tensor([[-1, 0, 0, 1]]))
        >>> tree.depth, tree.height
        (tensor([[0, 1, 1, 2]]), 2)
    """

    tokens: Tensor
    parents: Tensor
    probs: Tensor | None = None
    chain: bool = False
    confidence_bins: Tensor | None = None
    levels: int | None = None
    notes: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens.shape != self.parents.shape or self.tokens.dim() != 2:
            raise ValueError(
                f"DraftTree needs tokens and parents of the same shape (B, N), got {tuple(self.tokens.shape)} and "
                f"{tuple(self.parents.shape)}"
            )

    @classmethod
    def root_only(cls, root: Tensor) -> DraftTree:
        """An empty draft: the root (B,) int64 only. Verifying it is plain decoding.

        Examples:
            >>> DraftTree.root_only(torch.tensor([5, 6])).size
            1
        """
        return cls(root[:, None], root.new_full((len(root), 1), -1), chain=True)

    @classmethod
    @renamed_argument("keys", "confidence_bins")
    def from_chain(
        cls,
        root: Tensor,
        drafts: Tensor,
        lengths: Tensor | None = None,
        probs: Tensor | None = None,
        confidence_bins: Tensor | None = None,
    ) -> DraftTree:
        """A chain: one continuation per row.

        Args:
            root: (B,) int64, on any device.
            drafts: (B, K) int64; row b's first `lengths[b]` entries count.
            lengths: (B,) int64; None: K for every row.
            probs: (B, K, V) float32, probs[:, i] is the q that drafts[:, i] was drawn from; None: deterministic.
            confidence_bins: (B, K) int64, the confidence bins of the drafts.

        Examples:
            >>> tree = DraftTree.from_chain(torch.tensor([5]), torch.tensor([[7, 8]]))
            >>> tree.tokens, tree.parents
            (tensor([[5, 7, 8]]), tensor([[-1,  0,  1]]))
        """
        B, K = drafts.shape
        tokens = torch.cat([root[:, None].to(drafts.device), drafts], dim=1)  # (B, K + 1)
        parents = torch.arange(-1, K, device=drafts.device)[None].expand(B, K + 1)
        if lengths is not None:
            index = torch.arange(K + 1, device=drafts.device)
            parents = parents.masked_fill(index > lengths[:, None], -1)
        if probs is not None:
            probs = torch.cat([probs, torch.zeros_like(probs[:, :1])], dim=1)  # nothing drawn at the last node
            if lengths is not None:  # nor at any row's own last node
                probs = probs.masked_fill((index >= lengths[:, None])[..., None], 0.0)
        if confidence_bins is not None:
            confidence_bins = torch.cat([torch.zeros_like(confidence_bins[:, :1]), confidence_bins], dim=1)
        return cls(tokens, parents.contiguous(), probs, chain=True, confidence_bins=confidence_bins)

    def on(self, device: torch.device) -> DraftTree:
        """The draft on a device, without waiting for the copy."""
        if self.tokens.device == device:
            return self
        tokens, parents = moved(torch.stack([self.tokens, self.parents]), device)
        probs, bins = (given if given is None else given.to(device) for given in (self.probs, self.confidence_bins))
        notes = {name: note.to(device) for name, note in self.notes.items()}
        return replace(self, tokens=tokens, parents=parents, probs=probs, confidence_bins=bins, notes=notes)

    def after(self, root: Tensor) -> DraftTree:
        """The draft with another root (B,) int64.

        Examples:
            >>> DraftTree.from_chain(torch.tensor([5]), torch.tensor([[7, 8]])).after(torch.tensor([6])).tokens
            tensor([[6, 7, 8]])
        """
        tokens = root[:, None] if self.size == 1 else torch.cat([root[:, None], self.tokens[:, 1:]], 1)
        return replace(self, tokens=tokens)

    def first(self, size: int) -> DraftTree:
        """The tree of the first `size` nodes, the root included."""
        probs = None if self.probs is None else self.probs[:, :size]
        confidence_bins = None if self.confidence_bins is None else self.confidence_bins[:, :size]
        return replace(
            self,
            tokens=self.tokens[:, :size],
            parents=self.parents[:, :size],
            probs=probs,
            confidence_bins=confidence_bins,
        )

    def up_to_depth(self, most: Tensor | int) -> DraftTree:
        """The draft without its nodes below a depth. Node indices stay; a chain may get shorter.

        Args:
            most: depth of the deepest nodes that remain, for all rows or (B,) int64 on the draft's device.
        """
        draft = self
        if isinstance(most, int):
            if most == 0:
                return DraftTree.root_only(self.tokens[:, 0])
            if self.chain:
                draft = self.first(1 + most)
            most = self.parents.new_full((len(self.parents),), most)
        depth, most = draft.depth, most[:, None]
        parents = draft.parents.masked_fill(depth > most, -1)
        probs = None if draft.probs is None else draft.probs.masked_fill((depth >= most)[..., None], 0.0)
        return replace(draft, parents=parents, probs=probs)

    @property
    def keys(self) -> Tensor | None:
        """Deprecated name of `confidence_bins`."""
        warn_of_old_name("DraftTree.keys", "DraftTree.confidence_bins")
        return self.confidence_bins

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
        # Squaring the reachability matrix doubles the distance it covers, so log2(depth) products are enough.
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
        """Depth of the deepest node, or an upper bound (`levels`, and N - 1 of a chain)."""
        if self.chain:
            return self.size - 1
        return int(self.depth.max()) if self.levels is None else min(self.levels, self.size - 1)

    def child(self, node: Tensor, token: Tensor) -> Tensor:
        """(B,) int64, the child of each row's node (B,) with the given token (B,); -1 where there is none."""
        hit = (self.parents == node[:, None]) & (self.tokens == token[:, None])  # (B, N)
        return torch.where(hit.any(-1), hit.long().argmax(-1), -1)

    def children(self) -> Tensor:
        """(B, N, C) int64, each node's children in index order, -1 where there are fewer than C."""
        B, N = self.tokens.shape
        is_child = self.parents[:, None, :] == torch.arange(N, device=self.tokens.device)[:, None]  # (B, N, N)
        rank = is_child.cumsum(-1) - 1  # a child's index among its siblings
        width = max(1, int(is_child.sum(-1).max()))
        out = self.parents.new_full((B, N, width + 1), -1)  # the last column takes nodes that are no child
        index = torch.arange(N, device=self.tokens.device).expand(B, N, N)
        out.scatter_(2, torch.where(is_child, rank, width), index)
        return out[..., :width]
