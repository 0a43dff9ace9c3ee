"""`Outcome`: a round as the host sees it.

What transcript, report, pacing and proposers want to know of a round comes from the device in one copy, and is read
from here by all of them. Knows nothing of how it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Lists of B rows.

    Attributes:
        accepted: drafted nodes on each row's path. tokens: what it may write: the accepted ones, then the next.
        path: (B, D) as in the verdict. parents: (B, N) of the draft's nodes. keys: (B, N) of the draft, if it has any.
        notes: (B, n) each, by name: what the proposer wanted to know (`DraftTree.notes`).
    """

    accepted: list[int]
    tokens: list[list[int]]
    path: list[list[int]]
    parents: list[list[int]]
    keys: list[list[int]] | None
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
