"""`Estimates`: pass costs and acceptance rates, estimated from past rounds. `Pacer` decides with them.

Calls of one kind share their estimates, also between threads, without locks: an update replaces a value as a whole.
When two updates happen at once, one may be lost, but none is seen half done.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from math import sqrt
from statistics import median

SIZES = tuple(2**i for i in range(8))  # nodes per row of captured passes (`static_forward.nodes_of_size`)
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # largest nodes per row of passes with the same cost
STEPS = 15  # recent draft passes in the running median
PRIOR_STEP = 0.25  # prior cost of a draft pass, relative to a target pass


class PassCost:
    """Cost model of target passes: seconds of a round from the pass on, one estimate per bucket of nodes per row.

    Costs grow in steps: there is another kernel for more than one token, and rows are padded to powers of two. Buckets
    that were not observed are interpolated from their neighbours. About a third of an unexpected slowdown (or speedup)
    is attributed to the machine and applied to all buckets, since most buckets are rarely observed.

    Args:
        seen: by bucket, seconds and number of passes of another process. The first passes here scale all of them.
        buckets: largest nodes per row of passes with the same cost, ascending from 1.

    Attributes:
        reading: seconds per token of a long text.
    """

    PRIOR = 0.2  # prior cost of a second node, relative to a pass; n nodes add sqrt(n - 1) times as much
    TILT = 0.002  # least cost of a node, relative to a pass
    STEP, SHARED = 0.15, 0.3  # least weight of an observation; exponent of the part applied to all buckets
    OUTLIER, FAMILIAR_OUTLIER = 2.0, 1.25  # times the expected seconds, cut off above: another program was running
    LIKELY = 1.5  # times the expected seconds; above, the first pass of a size gets half the weight
    FAMILIAR = 3  # passes of a size after which its cost counts as known
    LEVELLING = 2  # the first passes of a process may be slower (allocator, caches)

    def __init__(self, seen: Mapping[int, tuple[float, int]] | None = None, buckets: Sequence[int] = BUCKETS):
        self._seen, self._buckets = dict(seen or {}), tuple(buckets)
        self._curve = _curve(self._seen, self._buckets)
        self._to_level = self.LEVELLING if seen else 0
        self.reading = 0.0  # seconds per token of a long text

    def observe(self, size: int, seconds: float) -> None:
        """Record the seconds of a pass over `size` nodes per row."""
        bucket, seen = self._bucket(size), self._seen
        if not seen:
            self._replace({bucket: (seconds, 1)})
            return
        expected, count = self(bucket), seen.get(bucket, (0.0, 0))[1]
        surprise = seconds / expected
        if self._to_level:
            self._to_level, shared = self._to_level - 1, surprise
        else:
            surprise = min(surprise, self.OUTLIER if count < self.FAMILIAR else self.FAMILIAR_OUTLIER)
            weight = 1 / (count + (1 if surprise < self.LIKELY else 2))
            surprise = 1 + max(weight, self.STEP) * (surprise - 1)
            shared = surprise**self.SHARED if count else 1.0
        others = {n: (old * shared, times) for n, (old, times) in seen.items()}
        self._replace({**others, bucket: (expected * surprise, count + 1)})

    def _replace(self, seen: dict[int, tuple[float, int]]) -> None:
        self._seen, self._curve = seen, _curve(seen, self._buckets)

    @property
    def explored(self) -> int:
        """The largest number of nodes per row for the next pass while costs are explored."""
        return 2 * max(2, *self._seen)

    @property
    def known(self) -> bool:
        """True after the first pass in this process, of any size."""
        return bool(self._seen) and self._to_level < self.LEVELLING

    def familiar(self, size: int) -> bool:
        """Return whether passes of about this size were observed often enough."""
        return self._seen.get(self._bucket(size), (0.0, 0))[1] >= self.FAMILIAR

    @property
    def plain(self) -> float:
        """Seconds of a round without a draft."""
        return self(1)

    def __call__(self, size: int) -> float:
        """Seconds of a round from the pass on, over `size` nodes per row including the root."""
        curve = self._curve
        return curve[size - 1] if size <= len(curve) else curve[-1] * size / len(curve)

    def seen(self) -> dict[int, tuple[float, int]]:
        """Observed seconds and number of passes, by bucket."""
        return dict(self._seen)

    def _bucket(self, size: int) -> int:
        return self._buckets[min(bisect_left(self._buckets, size), len(self._buckets) - 1)]


def _curve(seen: Mapping[int, tuple[float, int]], buckets: Sequence[int]) -> tuple[float, ...]:
    """Interpolate the seconds for 1, 2, ... nodes per row."""
    if not seen:
        return (0.0,)
    first = min(seen)
    plain = seen[1][0] if 1 in seen else seen[first][0] / (1 + PassCost.PRIOR * sqrt(first - 1))
    excess = {1: 0.0, **{n: max(0.0, seconds - plain) for n, (seconds, _) in seen.items()}}
    out: list[float] = []
    for bucket in buckets:
        below = max(n for n in excess if n <= bucket)
        above = min((n for n in excess if n >= bucket), default=None)
        if below == bucket:
            more = excess[bucket]
        elif above is not None:
            share = (sqrt(bucket - 1) - sqrt(below - 1)) / (sqrt(above - 1) - sqrt(below - 1))
            more = excess[below] + share * (excess[above] - excess[below])
        elif below > 1:
            more = excess[below] * sqrt((bucket - 1) / (below - 1))
        else:
            more = PassCost.PRIOR * plain * sqrt(bucket - 1)
        out += [plain + more - PassCost.TILT * plain * (bucket - n) for n in range(len(out) + 1, bucket + 1)]
    return tuple(out)


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

    A share of all seconds is added. Time that a round with a draft loses against plain decoding is subtracted, and
    time that it saves is added.
    """

    SHARE = 0.015  # share of the seconds that is added
    FIRST, MOST, LEAST = 0.6, 10.0, -1.0  # initial value, upper bound, and the bound below which it is overdrawn

    def __init__(self) -> None:
        self.left = self.FIRST

    @property
    def overdrawn(self) -> bool:
        return self.left < self.LEAST

    def observe(self, rounds: float, ahead: float) -> None:
        """Record a round of `rounds` passes' length that was `ahead` passes faster than plain decoding."""
        self.left = min(self.MOST, self.left + self.SHARE * rounds + ahead)


class DraftCost:
    """Cost model of draft passes. Where one pass drafts several tokens, tokens after the first cost less.

    Attributes:
        share: prior cost of a draft pass, relative to a target pass over one token.
        reading: seconds per token of a long text; 0: not known.
    """

    def __init__(self, share: float = PRIOR_STEP) -> None:
        self.share, self.reading = share, 0.0
        self._steps: tuple[float, ...] = ()
        self._read_out: tuple[float, ...] = ()

    @property
    def known(self) -> bool:
        """True if a draft pass has been measured in this process."""
        return bool(self._steps)

    @property
    def reads_out(self) -> bool:
        """True if one pass drafts several tokens."""
        return bool(self._read_out)

    def step(self, plain: float) -> float:
        """Seconds of one draft pass: the median of recent ones. plain: seconds of a target pass over one token."""
        return median(self._steps) if self._steps else self.share * plain

    def further(self, plain: float) -> float:
        """Seconds of each token after the first: a pass of its own, or one more token read out of the same pass."""
        return median(self._read_out) if self._read_out else self.step(plain)

    def observe(self, seconds: float) -> None:
        """Record a draft pass."""
        self._steps = (*self._steps[1 - STEPS :], seconds)

    def observe_read_out(self, seconds: float) -> None:
        """Record the reading of one more token out of a pass."""
        self._read_out = (*self._read_out[1 - STEPS :], seconds)


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
        self._pace = (0.0, 0.0)  # seconds and tokens of recent rounds, moving sums

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
        """Seconds of one draft pass."""
        return self.draft.step(self.verify.plain)

    @property
    def further_token(self) -> float:
        """Seconds to draft each token after the first."""
        return self.draft.further(self.verify.plain)

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds per token over all rows in recent rounds; None before the first round."""
        seconds, tokens = self._pace
        return seconds / tokens if tokens else None

    def observe_pace(self, seconds: float, new_tokens: float) -> None:
        """Record a round's seconds and its new tokens over all rows."""
        old_seconds, old_tokens = self._pace
        self._pace = (0.9 * old_seconds + seconds, 0.9 * old_tokens + new_tokens)
