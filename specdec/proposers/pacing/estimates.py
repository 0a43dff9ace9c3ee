"""`Estimates`: pass costs and acceptance rates, estimated from past rounds. `Pacer` decides with them.

Costs are in units of a target pass over one node per row, at the speed that the machine has at that time (see
`PassCost`). Calls of one kind share their estimates, also between threads, without locks: an update replaces a value as
a whole. When two updates happen at once, one may be lost, but none is seen half done.
"""

from __future__ import annotations

from collections.abc import Hashable
from statistics import median

from specdec.proposers.pacing.pass_cost import PassCost

STEPS = 7  # recent rounds in the running median of the cost of a draft pass
TEXTS = 3  # recent long texts in the running median
PRIOR_STEP = 0.25  # prior cost of a draft pass
MOST_STEP = 2.0  # largest cost that an observation counts as, so that exploration remains affordable


class Acceptance:
    """Acceptance rate per confidence bin, over tokens whose predecessors were all accepted.

    A proposer may give a prior for a bin, which counts as `WEIGHT` tokens. Priors are scaled by the recent ratio of
    accepted to expected tokens over all bins, which corrects an overconfident draft at once.
    """

    STEP = 0.05  # least weight of a new observation
    WEIGHT, LIKE_WEIGHT = 2.0, 8.0  # weight in tokens of a proposer's prior, and of the rate of a similar bin
    UNKNOWN = 0.4  # rate of a bin without a prior

    def __init__(self) -> None:
        self._rates: dict[Hashable, tuple[float, int]] = {}
        self._expected: dict[Hashable, float] = {}
        self._trust = (1.0, 1.0)  # accepted tokens and expected ones, moving sums

    def observe(self, key: Hashable, accepted: bool, prior: float | None = None) -> None:
        """Record one token of bin `key`. prior: the expected rate, by default the last one given to `rate`."""
        rate, count = self._rates.get(key, (0.0, 0))
        self._rates[key] = (rate + max(1 / (count + 1), self.STEP) * (accepted - rate), count + 1)
        prior = self._expected.get(key) if prior is None else prior
        if prior is not None:
            came_true, expected = self._trust
            keep = 1 - self.STEP
            self._trust = (keep * came_true + accepted, keep * expected + prior)

    def rate(self, key: Hashable, prior: float | None = None, like: float | None = None) -> float:
        """Estimate the acceptance rate of a confidence bin.

        Args:
            key: the bin.
            prior: the proposer's own expectation.
            like: the rate of a similar bin, used in place of `prior`.
        """
        expected, weight = self.UNKNOWN, self.WEIGHT
        if like is not None:
            expected, weight = like, self.LIKE_WEIGHT
        elif prior is not None:
            self._expected[key] = prior
            expected = min(1.0, prior * self.trust)
        rate, count = self._rates.get(key, (0.0, 0))
        count = min(count, int(1 / self.STEP))
        return (rate * count + expected * weight) / (count + weight)

    @property
    def tested(self) -> bool:
        """True if any token has been accepted or rejected."""
        return bool(self._rates)

    @property
    def trust(self) -> float:
        """The recent ratio of accepted to expected tokens."""
        came_true, expected = self._trust
        return came_true / expected


class Budget:
    """Exploration budget: time that drafting may lose against plain decoding, in target passes over one token.

    A share of all time is added. Time that a round with a draft loses against plain decoding is subtracted, and time
    that it saves is added.
    """

    SHARE = 0.015  # share of the time that is added
    FIRST, MOST = 0.6, 10.0  # initial value and upper bound

    def __init__(self) -> None:
        self.left = self.FIRST

    def observe(self, rounds: float, ahead: float) -> None:
        """Record a round of `rounds` passes' length that was `ahead` passes faster than plain decoding."""
        self.left = min(self.MOST, self.left + self.SHARE * rounds + ahead)


class DraftCost:
    """Cost model of draft passes. Where one pass drafts several tokens, tokens after the first cost less.

    Args:
        share: prior cost of a draft pass.
    """

    def __init__(self, share: float = PRIOR_STEP) -> None:
        self.share = share
        self._steps: tuple[float, ...] = ()
        self._read_out: tuple[float, ...] = ()
        self._texts: tuple[float, ...] = ()

    @property
    def known(self) -> bool:
        """True if a draft pass has been measured in this process."""
        return bool(self._steps)

    @property
    def reads_out(self) -> bool:
        """True if one pass drafts several tokens."""
        return bool(self._read_out)

    @property
    def step(self) -> float:
        """Cost of one draft pass: the median of recent ones."""
        return median(self._steps) if self._steps else self.share

    @property
    def further(self) -> float:
        """Cost of each token after the first: a pass of its own, or one more token read out of the same pass."""
        return median(self._read_out) if self._read_out else self.step

    @property
    def reading(self) -> float:
        """Cost per token of a long text; 0: not known."""
        return median(self._texts) if self._texts else 0.0

    def observe(self, cost: float) -> None:
        """Record the mean cost of a round's draft passes."""
        self._steps = (*self._steps[1 - STEPS :], min(cost, MOST_STEP))

    def observe_read_out(self, cost: float) -> None:
        """Record the mean cost of reading one more token out of a pass in one round."""
        self._read_out = (*self._read_out[1 - STEPS :], min(cost, MOST_STEP))

    def observe_text(self, cost: float, tokens: int) -> None:
        """Record a pass that read a long text."""
        self._texts = (*self._texts[1 - TEXTS :], cost / tokens)


class Estimates:
    """Estimates shared by all calls of one kind: the same batch size, all sampling or none.

    Attributes:
        verify: cost model of target passes.
        draft: cost model of draft passes.
        acceptance: acceptance rates per confidence bin.
        budget: exploration budget.
    """

    def __init__(self, verify: PassCost | None = None, draft: DraftCost | None = None) -> None:
        self.verify = PassCost() if verify is None else verify
        self.draft = DraftCost() if draft is None else draft
        self.acceptance = Acceptance()
        self.budget = Budget()
        self._expected = (0.75, 2)
        self._pace = (0.0, 0.0)  # cost and tokens of recent rounds, moving sums

    def apart(self) -> Estimates:
        """Estimates for a proposer that drafts in some of the rounds: shared, except for the pace."""
        other = Estimates(self.verify, self.draft)
        other.acceptance, other.budget = self.acceptance, self.budget
        return other

    @property
    def expected_rate(self) -> float:
        """Expected acceptance rate of a token not yet evaluated: the running mean over evaluated ones."""
        return self._expected[0]

    def observe_expectation(self, rate: float) -> None:
        """Record the expected acceptance rate of an evaluated token."""
        old, count = self._expected
        self._expected = (old + max(1 / (count + 1), Acceptance.STEP) * (rate - old), count + 1)

    @property
    def draft_step(self) -> float:
        """Cost of one draft pass."""
        return self.draft.step

    @property
    def further_token(self) -> float:
        """Cost of drafting each token after the first."""
        return self.draft.further

    @property
    def cost_per_token(self) -> float | None:
        """Cost per token over all rows in recent rounds; None before the first round."""
        cost, tokens = self._pace
        return cost / tokens if tokens else None

    def observe_pace(self, cost: float, new_tokens: float) -> None:
        """Record a round's cost and its new tokens over all rows."""
        old_cost, old_tokens = self._pace
        self._pace = (0.9 * old_cost + cost, 0.9 * old_tokens + new_tokens)
