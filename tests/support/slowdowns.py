"""Recorded slowdowns of a machine that other programs use, for the simulated machine.

Time is in target passes over one token on the quiet machine. Recorded on two cores of an AMD EPYC with a 0.5B model in
bfloat16 (a pass takes 90 ms) by `python -m benchmarks.regression.slowdowns`.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import sin, tau

# Beside a program with two threads: OpenMP's threads wait for each other at every layer.
TWO_THREADS = [
    *(26, 26, 26, 26, 26, 26, 26, 27, 20, 23, 13, 19, 25, 19, 26, 25, 19, 14, 26, 26, 26, 20, 24, 20, 22, 19, 25, 21),
]
# Beside a program with one thread.
ONE_THREAD = [
    *(2.2, 3.0, 3.7, 3.3, 2.7, 3.7, 4.2, 4.2, 3.8, 4.1, 2.8, 2.9, 2.2, 3.7, 2.0, 3.9, 3.5, 3.1, 4.4, 2.0, 2.5, 4.1),
    *(2.8, 3.2, 2.8, 3.0, 3.0, 3.9, 3.1, 3.0, 2.9, 3.9, 5.1, 4.5, 3.3, 4.8, 4.1, 2.1, 2.0, 2.6, 2.7, 3.1, 4.2, 2.9),
    *(2.9, 4.0, 4.5, 4.2, 3.5, 3.1, 4.6, 2.8, 4.4, 2.1, 2.0, 3.8, 5.1, 3.9, 4.0, 3.1, 3.6, 3.4, 2.2, 2.2, 3.8, 3.9),
    *(4.1, 3.9, 3.5, 2.8, 3.2, 4.2, 3.7, 5.0, 3.6, 5.0, 2.9, 3.6, 4.9, 3.8),
]


def quiet(now: float) -> float:
    """No other program runs."""
    return 1.0


class Recorded:
    """The slowdown at each time while other programs come and go, repeated for ever.

    Args:
        parts: lists of factors, one for each pass of the recording. A pass took its factor's time.
    """

    def __init__(self, *parts: list[float]):
        self._factors = [factor for part in parts for factor in part]
        self._starts = [0.0, *accumulate(self._factors)]

    def __call__(self, now: float) -> float:
        return self._factors[bisect_right(self._starts, now % self._starts[-1]) - 1]


def drift(now: float) -> float:
    """A slow swing between 1 and 1.5, as of a clock frequency or of a neighbour on the same host."""
    return 1.25 + 0.25 * sin(tau * now / 400)


SLOWDOWNS = {
    "bursts": Recorded([1.0] * 60, ONE_THREAD[:20], [1.0] * 90, ONE_THREAD[20:60]),
    "short bursts": Recorded([1.0] * 23, ONE_THREAD[:3], [1.0] * 11, ONE_THREAD[3:5]),
    "stalls": Recorded([1.0] * 50, TWO_THREADS[:6], [1.0] * 110, TWO_THREADS[8:26]),
    "shared": Recorded(ONE_THREAD),
    "drift": drift,
}
