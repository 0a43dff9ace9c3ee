"""The result of a round: `Verdict` on the device, `Outcome` on the host, and `NewTokens`, each row's new tokens.

A proposer that needs only `NewTokens` can draft before the host has read the verdict (`Proposer.draft_ahead`).
Transcript, report, pacing and proposers read the `Outcome`, which reaches the host in one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.sampling.draft_tree import DraftTree


@dataclass(frozen=True)
class Outcome:
    """A round's result on the host, as lists of B rows.

    Attributes:
        accepted: (B,), number of accepted draft tokens.
        tokens: each row's new tokens: the accepted ones, then the bonus or recovered one.
        path: (B, D), as in `Verdict`.
        parents: (B, N), as in `DraftTree`.
        confidence_bins: (B, N), as in `DraftTree`; None if the draft has none.
        notes: lists (B, n) by name, as in `DraftTree`.

    Examples:
        >>> outcome = Outcome([1], [[7, 4]], [[0, 1]], [[-1, 0, 0]], None, {})
        >>> outcome.nodes, outcome.deepest
        ([2], [1])
    """

    accepted: list[int]
    tokens: list[list[int]]
    path: list[list[int]]
    parents: list[list[int]]
    confidence_bins: list[list[int]] | None
    notes: Mapping[str, list[list[Any]]]

    @cached_property
    def nodes(self) -> list[int]:
        """Number of drafted tokens per row."""
        return [sum(parent >= 0 for parent in row) for row in self.parents]

    @cached_property
    def deepest(self) -> list[int]:
        """Depth of each row's deepest node."""
        return [max(depths_of(row)) for row in self.parents]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Each node's distance from the root, which comes first; 0 for padding.

    Examples:
        >>> depths_of([-1, 0, 0, 1])
        [0, 1, 1, 2]
    """
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


@dataclass(frozen=True)
class Verdict:
    """The result of a verification rule. Each row gets `accepted + 1` new tokens.

    Args:
        path: (B, D) int64, node indices from the root (column 0) down the accepted path. Beyond a row's accepted
            length each column holds its own index, so that moving node path[d] to slot d changes nothing there.
        accepted: (B,) int64, number of accepted draft tokens, < D.
        next_token: (B,) int64, the token after the path: the bonus token if the whole path was accepted, else the
            recovered one.
        outcome: the same on the host, once the loop has read it.

    Examples:
        >>> tree = DraftTree(torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 0]]))
        >>> verdict = Verdict(path=torch.tensor([[0, 2]]), accepted=torch.tensor([1]), next_token=torch.tensor([4]))
        >>> verdict.new_tokens(tree)
        tensor([[3, 4]])
    """

    path: Tensor
    accepted: Tensor
    next_token: Tensor
    outcome: Outcome | None = None

    def new_tokens(self, tree: DraftTree) -> Tensor:
        """(B, D) int64, the accepted tokens, then `next_token`; row b's first `accepted[b] + 1` entries count."""
        accepted_tokens = tree.tokens.gather(1, self.path)[:, 1:]  # (B, D - 1)
        tokens = torch.cat([accepted_tokens, self.next_token[:, None]], dim=1)
        return tokens.scatter(1, self.accepted[:, None], self.next_token[:, None])


@dataclass(frozen=True)
class NewTokens:
    """New tokens of B rows, padded on the left to D.

    Attributes:
        tokens: (B, D) int64, the accepted tokens, then the bonus or recovered one.
        pads: (B,) int64, how many of the D are padding.
        states: (B, D, C), the target's features at the token before each of them; None for a proposer without taps.

    Examples:
        >>> NewTokens(torch.tensor([[3, 4]]), torch.tensor([0]), None).padded(3)
        NewTokens(tokens=tensor([[0, 3, 4]]), pads=tensor([1]), states=None)
    """

    tokens: Tensor
    pads: Tensor
    states: Tensor | None

    def padded(self, width: int) -> NewTokens:
        """Pad to `width` tokens."""
        more = width - self.tokens.shape[1]
        if not more:
            return self
        states = None if self.states is None else pad(self.states, (0, 0, more, 0))
        return NewTokens(pad(self.tokens, (more, 0)), self.pads + more, states)


def features_at(features: Tensor, nodes: Tensor) -> Tensor:
    """Select the features of some nodes.

    Args:
        features: (B, N, C), features of all nodes.
        nodes: (B, W) int64, indices of nodes.

    Returns:
        (B, W, C), the features of `nodes`.

    Examples:
        >>> features_at(torch.tensor([[[0.5], [1.5], [2.5]]]), torch.tensor([[2, 0]]))
        tensor([[[2.5000],
                 [0.5000]]])
    """
    return features.gather(1, nodes.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
