"""A clock that excludes the time spent on autotuning and compilation."""

from __future__ import annotations

from threading import local
from time import perf_counter


class _Lost(local):
    seconds = 0.0


_lost = _Lost()  # one-time costs of this thread


def lose(seconds: float) -> None:
    """Exclude a one-time cost, of autotuning or compilation, from this thread's `clock`.

    Examples:
        >>> start = clock()
        >>> lose(60.0)
        >>> clock() - start < 0
        True
    """
    _lost.seconds += seconds


def clock() -> float:
    """`time.perf_counter` in seconds, less the one-time costs of this thread (`lose`)."""
    return perf_counter() - _lost.seconds
