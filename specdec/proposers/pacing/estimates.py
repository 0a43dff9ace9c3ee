"""`Estimates`: what passes cost here and what gets accepted, as earlier rounds showed it.

Owns the estimates. Knows nothing of the decisions made from them (see `pacing`). Calls of one kind share them, threads
too, without locks: each estimate is one value that is replaced whole. Of two updates at once one may be lost; none is
ever seen half made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from math import sqrt
from statistics import median

SIZES = tuple(2**i for i in range(8))  # nodes per row that captured passes are run in (`static_forward.nodes_of_size`)
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # nodes per row of passes that are taken to cost the same
STEPS = 15  # recent draft passes that are remembered
PRIOR_STEP = 0.25  # of a target pass: a draft pass that has not been measured yet


class PassCost:
    """Seconds of a round from the target's pass on, by the nodes per row: a step function, a figure per bucket.

    Steps, as costs have them: another kernel for more than one token, rows in powers of two. What was never seen is
    taken from its neighbours. Of a surprise a third is believed to be the machine's (another program, a longer text),
    and moves the other buckets as well: most are seldom seen.
    """

    PRIOR = 0.2  # of a pass: what a second node adds where nothing was measured; n nodes, sqrt(n - 1) times that
    TILT = 0.002  # of a pass: what a node costs at least
    STEP, SHARED = 0.15, 0.3
    OUTLIER, FAMILIAR_OUTLIER = 2.0, 1.25  # times the expected seconds: what takes longer was another program's doing
    LIKELY = 1.5  # times the expected seconds: beyond, the first pass of a size is believed by half
    FAMILIAR = 3  # passes of a size: then its cost is known
    LEVELLING = 2  # passes: a process's first may be slow for reasons of its own

    def __init__(self, seen: Mapping[int, tuple[float, int]] | None = None, buckets: Sequence[int] = BUCKETS):
        """seen: by bucket, seconds and how often; of another process, so that the first passes here set the level.
        buckets: largest sizes of passes that cost the same, ascending from 1."""
        self._seen, self._buckets = dict(seen or {}), tuple(buckets)
        self._curve = _curve(self._seen, self._buckets)
        self._to_level = self.LEVELLING if seen else 0
        self.reading = 0.0  # seconds per token of a long text

    def observe(self, size: int, seconds: float) -> None:
        """Book a pass over so many nodes per row."""
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
        """Nodes of the next pass at most, where costs have to be explored."""
        return 2 * max(2, *self._seen)

    @property
    def known(self) -> bool:
        """Has a pass of any size been seen, here?"""
        return bool(self._seen) and self._to_level < self.LEVELLING

    def familiar(self, size: int) -> bool:
        """Were passes of about this size seen often enough?"""
        return self._seen.get(self._bucket(size), (0.0, 0))[1] >= self.FAMILIAR

    @property
    def plain(self) -> float:
        """Seconds of a round without a draft."""
        return self(1)

    def __call__(self, size: int) -> float:
        """Seconds of a round from the pass on, `size` nodes per row, the root included."""
        curve = self._curve
        return curve[size - 1] if size <= len(curve) else curve[-1] * size / len(curve)

    def seen(self) -> dict[int, tuple[float, int]]:
        return dict(self._seen)

    def _bucket(self, size: int) -> int:
        return self._buckets[min(bisect_left(self._buckets, size), len(self._buckets) - 1)]


def _curve(seen: Mapping[int, tuple[float, int]], buckets: Sequence[int]) -> tuple[float, ...]:
    """Seconds for 1, 2, ... nodes per row."""
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
    """Conditional acceptance rate per key: of the tokens with this key whose predecessors were all accepted.

    A proposer may say what it expects of a key; that counts for `WEIGHT` tokens, scaled by how far its expectations
    came true of late, whichever the key: a draft that is sure of itself in vain is found out at once.
    """

    STEP = 0.05  # weight of a new observation in the long run
    WEIGHT, LIKE_WEIGHT = 2.0, 8.0
    UNKNOWN = 0.4  # of a key that nobody expects anything of

    def __init__(self) -> None:
        self._rates: dict[Hashable, tuple[float, int]] = {}
        self._expected: dict[Hashable, float] = {}
        self._trust = (1.0, 1.0)  # tokens that came true, that were expected to; of late

    def observe(self, key: Hashable, accepted: bool, prior: float | None = None) -> None:
        rate, count = self._rates.get(key, (0.0, 0))
        self._rates[key] = (rate + max(1 / (count + 1), self.STEP) * (accepted - rate), count + 1)
        prior = self._expected.get(key) if prior is None else prior
        if prior is not None:
            came_true, expected = self._trust
            keep = 1 - self.STEP
            self._trust = (keep * came_true + accepted, keep * expected + prior)

    def rate(self, key: Hashable, prior: float | None = None, like: float | None = None) -> float:
        """prior: what the proposer expects. like: the rate of a similar key."""
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
        """Was any token seen accepted or rejected?"""
        return bool(self._rates)

    @property
    def trust(self) -> float:
        came_true, expected = self._trust
        return came_true / expected


class Budget:
    """How far drafting may fall behind plain decoding, in passes of the target over one token.

    A share of all seconds is laid by; what a round with a draft takes longer than plain decoding would have is taken
    out, what it gains is put back.
    """

    SHARE = 0.015  # of the seconds
    FIRST, MOST, LEAST = 0.6, 10.0, -1.0

    def __init__(self) -> None:
        self.left = self.FIRST

    @property
    def overdrawn(self) -> bool:
        return self.left < self.LEAST

    def observe(self, rounds: float, ahead: float) -> None:
        """rounds: the seconds, in passes. ahead: of plain decoding."""
        self.left = min(self.MOST, self.left + self.SHARE * rounds + ahead)


class DraftCost:
    """Seconds of a draft's passes. Where one pass drafts several tokens, those behind the first cost less.

    Attributes:
        share: of a pass of the target over one token, that a step is taken to cost before one was measured here.
        reading: seconds per token of a long text; 0: not known.
    """

    def __init__(self, share: float = PRIOR_STEP) -> None:
        self.share, self.reading = share, 0.0
        self._steps: tuple[float, ...] = ()
        self._read_out: tuple[float, ...] = ()

    @property
    def known(self) -> bool:
        """Has a step been measured here?"""
        return bool(self._steps)

    @property
    def reads_out(self) -> bool:
        """Does one pass draft several tokens?"""
        return bool(self._read_out)

    def step(self, plain: float) -> float:
        """Seconds of one draft pass: the median of recent ones. plain: of a pass of the target."""
        return median(self._steps) if self._steps else self.share * plain

    def further(self, plain: float) -> float:
        """Seconds of a token behind another: of a pass of its own, unless it was read out of the same."""
        return median(self._read_out) if self._read_out else self.step(plain)

    def observe(self, seconds: float) -> None:
        self._steps = (*self._steps[1 - STEPS :], seconds)

    def observe_read_out(self, seconds: float) -> None:
        self._read_out = (*self._read_out[1 - STEPS :], seconds)


class Estimates:
    """What calls of one kind, a batch size and sampling or not, learn from each other, also at the same time.

    Attributes:
        verify: costs of target passes. draft: of the draft's. acceptance: per key. budget: for trials.
    """

    def __init__(self, verify: PassCost | None = None, draft: DraftCost | None = None) -> None:
        self.verify = PassCost() if verify is None else verify
        self.draft = DraftCost() if draft is None else draft
        self.acceptance = Acceptance()
        self.budget = Budget()
        self._expected = (0.75, 2)
        self._pace = (0.0, 0.0)  # seconds and tokens of recent rounds, moving sums

    def apart(self) -> Estimates:
        """For a proposer that drafts in some of the rounds: all the same, but a pace of its own."""
        other = Estimates(self.verify, self.draft)
        other.acceptance, other.budget = self.acceptance, self.budget
        return other

    @property
    def expected_rate(self) -> float:
        """Of a token that was not looked at yet: of those that were, how likely they were to be accepted."""
        return self._expected[0]

    def observe_expectation(self, rate: float) -> None:
        old, count = self._expected
        self._expected = (old + max(1 / (count + 1), Acceptance.STEP) * (rate - old), count + 1)

    @property
    def draft_step(self) -> float:
        """Seconds of one draft pass."""
        return self.draft.step(self.verify.plain)

    @property
    def further_token(self) -> float:
        """Seconds of drafting a token behind another."""
        return self.draft.further(self.verify.plain)

    @property
    def seconds_per_token(self) -> float | None:
        """Over all rows, at the present rate; None before the first round."""
        seconds, tokens = self._pace
        return seconds / tokens if tokens else None

    def observe_pace(self, seconds: float, new_tokens: float) -> None:
        """Book what a round took and how many tokens it gained over all rows."""
        old_seconds, old_tokens = self._pace
        self._pace = (0.9 * old_seconds + seconds, 0.9 * old_tokens + new_tokens)
