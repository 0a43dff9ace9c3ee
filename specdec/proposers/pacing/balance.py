"""`Balance`: what drafting saved and lost in one call, and how much more it may lose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Balance:
    """Balance of one call: what drafting saved and lost, in target passes over one node per row.

    Attributes:
        took: the cost of the call.
        saved: what it saved by drafting, the reading of prompts left out; negative: what it lost.
    """

    SHARE, LENGTH = 0.01, 64  # share of a call's passes that drafting may lose; passes assumed for every call
    TRIAL = 1.0  # passes that exploration may lose beyond that

    took: float = 0.0
    saved: float = 0.0

    @property
    def may_lose(self) -> float:
        """Passes that this call may still lose by drafts that are expected to pay. At zero and below, they wait."""
        return self.SHARE * (self.LENGTH + self.took) + self.saved

    @property
    def may_try(self) -> float:
        """Passes that this call may still lose by exploration."""
        return self.may_lose + self.TRIAL
