"""The result of a round: `Verdict` on the device, `Outcome` on the host, and `NewTokens`, the tokens each row gains.

A proposer that needs no more than `NewTokens` can draft on before the host has read the verdict
(`Proposer.draft_ahead`). Transcript, report, pacing and proposers read the `Outcome`, which comes in one copy.
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
    """Lists of B rows.

    Attributes:
        accepted: drafted nodes on each row's path. tokens: what it may write: the accepted ones, then the next.
        path: (B, D) as in the verdict. parents: (B, N) of the draft's nodes. confidence_bins: (B, N) of the draft, if it has any.
        notes: (B, n) each, by name: what the proposer wanted to know (`DraftTree.notes`).
    """

    accepted: list[int]
    tokens: list[list[int]]
    path: list[list[int]]
    parents: list[list[int]]
    confidence_bins: list[list[int]] | None
    notes: Mapping[str, list[list[Any]]]

    @cached_property
    def nodes(self) -> list[int]:
        """How many were drafted."""
        return [sum(parent >= 0 for parent in row) for row in self.parents]

    @cached_property
    def deepest(self) -> list[int]:
        """Depth of the deepest node."""
        return [max(depths_of(row)) for row in self.parents]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Each node's distance from the root, which is the first; 0 for padding."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


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


@dataclass(frozen=True)
class NewTokens:
    """Of B rows, padded on the left to D.

    Attributes:
        tokens: (B, D) int64, accepted ones and the next. pads: (B,) int64, how many of the D are padding.
        states: (B, D, C), the target's at the tokens before each of them; None for a proposer without taps.
    """

    tokens: Tensor
    pads: Tensor
    states: Tensor | None

    def padded(self, width: int) -> NewTokens:
        """To a larger D."""
        more = width - self.tokens.shape[1]
        if not more:
            return self
        states = None if self.states is None else pad(self.states, (0, 0, more, 0))
        return NewTokens(pad(self.tokens, (more, 0)), self.pads + more, states)


def features_at(features: Tensor, nodes: Tensor) -> Tensor:
    """(B, W, C) of nodes (B, W) int64 of the draft, from features (B, N, C) of all of them."""
    return features.gather(1, nodes.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
