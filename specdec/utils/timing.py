"""A clock that leaves out the time that measurements of our own took."""

from __future__ import annotations

from threading import local
from time import perf_counter


class _Lost(local):
    seconds = 0.0


_lost = _Lost()  # in this thread, to ways that were slower than others


def lose(seconds: float) -> None:
    """What was spent once is no pass's cost."""
    _lost.seconds += seconds


def clock() -> float:
    """Seconds that passed, less those that this thread lost to slow ways: they were tried, and are not taken again."""
    return perf_counter() - _lost.seconds
