"""`PassCost`: cost model of target passes, in units of a pass over one node per row.

Seconds of a shared machine say little by themselves: another program makes passes several times slower, for seconds
at a time. So only passes that ran one after the other are compared, and costs are ratios.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median

SIZES = tuple(2**i for i in range(8))  # nodes per row of captured passes (`static_forward.nodes_of_size`)
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # largest nodes per row of passes with the same cost


class PassCost:
    """Cost model of target passes: a round from the pass on, one estimate per bucket of nodes per row.

    Costs grow in steps: there is another kernel for more than one token, and rows are padded to powers of two. Buckets
    that were not observed are interpolated from their neighbours. A pass is compared with the one before it, if that
    was of another bucket. A cost is the median of its bucket's recent comparisons, so that one of them may be wrong:
    another program may begin or end between two passes.

    Args:
        seen: by bucket, the cost and the number of passes, as measured by another process. In any unit, if bucket 1 is
            among them.
        buckets: largest nodes per row of passes with the same cost, ascending from 1.

    Attributes:
        known: True after the first pass in this process, of any size.
        reading: cost per token of a long text.
    """

    PRIOR = 0.2  # prior cost of a second node; n nodes add sqrt(n - 1) times as much
    GROWTH = 0.25  # expected growth of the cost beyond the largest size seen, as a power of the nodes after the first
    TILT = 0.002  # least cost of a node
    RECENT = 5  # comparisons of a bucket in its running median
    LEAST, MOST = 0.9, 1.5  # bounds of a comparison: the cost of a pass, and of each of its nodes
    AGREES = 1.25  # factor up to which a comparison confirms what is expected
    FAMILIAR = 3  # comparisons of a size after which its cost counts as known
    CONFIRMED = 4  # most confirmations that count; a run without plain passes may be three times as long with each

    def __init__(self, seen: Mapping[int, tuple[float, int]] | None = None, buckets: Sequence[int] = BUCKETS):
        seen, self._buckets = dict(seen or {}), tuple(buckets)
        self._counts = {n: count for n, (_, count) in seen.items()}  # comparisons by bucket
        unit = seen.get(1, (1.0, 0))[0]
        compared = {n: pair for n, pair in seen.items() if n > 1 and pair[1]}
        self._recent = {n: (_plausible(n, cost / unit),) * count for n, (cost, count) in compared.items()}
        self._curve = self._interpolated()
        self._before: tuple[int, float] | None = None  # bucket and seconds of the pass before
        self.known = False
        self._confirmed = 0  # comparisons with passes over a single node that agreed, less those that did not
        self._comparisons = 0  # comparisons with passes over a single node
        self._run = 0  # passes since the last one over a single node
        self.reading = 0.0

    def begin(self) -> None:
        """Begin a call: its first pass is not compared with the last one of another call."""
        self._before = None

    def observe(self, size: int, seconds: float) -> None:
        """Record the seconds of a pass over `size` nodes per row."""
        bucket, before = self._bucket(size), self._before
        self._counts = {bucket: 0, **self._counts}
        if before is not None and before[0] != bucket:
            self._compare(*before, bucket, seconds)
        self._before, self._run = (bucket, seconds), self._run + 1 if bucket > 1 else 0
        self.known = True

    def _compare(self, before: int, seconds_before: float, bucket: int, seconds: float) -> None:
        """Correct the cost of the bucket that is known less, by passes that ran one after the other."""
        ratio = seconds / seconds_before
        if bucket == 1 or (before > 1 and self._count(before) < self._count(bucket)):
            before, bucket, ratio = bucket, before, 1 / ratio
        recent = self._recent.get(bucket, (self(bucket),))
        cost = _plausible(bucket, ratio * self(before))
        if before == 1:
            self._comparisons += 1
            agrees = min(recent) / self.AGREES < cost < max(recent) * self.AGREES
            self._confirmed = max(0, min(self.CONFIRMED, self._confirmed + (1 if agrees else -1)))
        self._recent = {**self._recent, bucket: (*recent[1 - self.RECENT :], cost)}
        self._counts = {**self._counts, bucket: self._count(bucket) + 1}
        self._curve = self._interpolated()

    @property
    def explored(self) -> int:
        """The largest number of nodes per row for the next pass while costs are explored."""
        return 2 * max(2, *self._counts)

    @property
    def compared(self) -> bool:
        """True if passes over a single node were compared with others often enough to say what those cost."""
        return self._comparisons >= self.FAMILIAR

    def familiar(self, size: int) -> bool:
        """Return whether passes of about this size were observed often enough."""
        return self._count(self._bucket(size)) >= self.FAMILIAR

    def needs_plain(self, speedup: float) -> bool:
        """Return whether the next pass should be one over a single node, to compare others with it.

        They become rare while comparisons confirm what is expected, and where drafting pays so much that no error of
        the costs changes a decision.

        Args:
            speedup: the expected speed-up of drafting.
        """
        known = min(self._confirmed, self._count(self._before[0])) if self._before else self._confirmed
        sure = max(1.0, speedup) if known >= self.FAMILIAR else 1.0
        return self._run >= 3**known * sure

    def __call__(self, size: int) -> float:
        """Cost of a round from the pass on, over `size` nodes per row including the root; 1 for one node."""
        curve = self._curve
        return curve[size - 1] if size <= len(curve) else curve[-1] * size / len(curve)

    def seen(self) -> dict[int, tuple[float, int]]:
        """Observed costs and number of comparisons, by bucket."""
        return {n: (self(n), count) for n, count in self._counts.items()}

    def _count(self, bucket: int) -> int:
        return self._counts.get(bucket, 0)

    def _bucket(self, size: int) -> int:
        return self._buckets[min(bisect_left(self._buckets, size), len(self._buckets) - 1)]

    def _interpolated(self) -> tuple[float, ...]:
        """Interpolate the costs for 1, 2, ... nodes per row."""
        excess = {1: 0.0, **{n: max(0.0, median(costs) - 1) for n, costs in self._recent.items()}}
        out: list[float] = []
        for bucket in self._buckets:
            below = max(n for n in excess if n <= bucket)
            above = min((n for n in excess if n >= bucket), default=None)
            if below == bucket:
                more = excess[bucket]
            elif above is not None:
                share = (sqrt(bucket - 1) - sqrt(below - 1)) / (sqrt(above - 1) - sqrt(below - 1))
                more = excess[below] + share * (excess[above] - excess[below])
            elif below > 1:
                more = excess[below] * ((bucket - 1) / (below - 1)) ** self.GROWTH
            else:
                more = self.PRIOR * sqrt(bucket - 1)
            out += [1 + more - self.TILT * (bucket - n) for n in range(len(out) + 1, bucket + 1)]
        return tuple(out)


def _plausible(nodes: int, cost: float) -> float:
    return min(max(cost, PassCost.LEAST), PassCost.MOST * nodes)
