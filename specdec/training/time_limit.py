"""Time limit of a run, which bounds updates, evaluations and checkpoints alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

Clock = Callable[[], float]  # seconds, such as `time.monotonic`


class TimeLimit:
    """Time that a run may take.

    Args:
        minutes: the limit. None: no limit. 0: each run does the smallest piece of work that it can resume from.
        clock: function that returns seconds.
        started: time on this clock from which the limit counts. None: now.

    Examples:
        >>> limit = TimeLimit(1, clock=lambda: 0.0)
        >>> limit.left(), limit.allows(50), limit.allows(70)
        (60.0, True, False)
    """

    def __init__(self, minutes: float | None = None, clock: Clock = time.monotonic, started: float | None = None):
        self.clock, self.minutes = clock, minutes
        self._end = math.inf if minutes is None else (clock() if started is None else started) + 60 * minutes

    @property
    def is_zero(self) -> bool:
        return self.minutes == 0

    def left(self) -> float:
        """Seconds until the limit; negative after it."""
        return self._end - self.clock()

    def allows(self, seconds: float = 0.0, together: torch.device | None = None) -> bool:
        """Return whether work that takes so many seconds ends before the limit.

        Args:
            seconds: expected duration of the work.
            together: device on which all processes of a run agree: the work is allowed if each of them allows it. All
                of them must call this. None: this process decides alone.
        """
        denied = self.left() <= seconds
        if together is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            count = torch.tensor(float(denied), device=together)
            torch.distributed.all_reduce(count)
            denied = bool(count)
        return not denied


class OutOfTime(Exception):
    """Raised where work is given up because the time limit has come."""


class TimedSteps:
    """Steps of one kind of work, each of which is begun only if it is expected to end before the limit.

    Args:
        limit: time limit of the run.
        expected: seconds that a step is expected to take, from earlier ones; 0 if not known.
        unlimited: begin all steps, whatever time is left.
        at_least: number of steps to begin, whatever time is left.
        together: see `TimeLimit.allows`.
        progress: called after each step with the number that `done` was given.

    Attributes:
        longest: seconds of the longest step so far, or those expected.
    """

    def __init__(
        self,
        limit: TimeLimit,
        expected: float = 0.0,
        *,
        unlimited: bool = False,
        at_least: int = 0,
        together: torch.device | None = None,
        progress: Callable[[int], Any] = lambda count: None,
    ):
        self.longest = expected
        self._limit, self._unlimited, self._together, self._progress = limit, unlimited, together, progress
        self._start, self._owed = limit.clock(), at_least

    def left(self) -> float:
        """Seconds that a step may take; infinite if it must be finished."""
        return math.inf if self._unlimited else self._limit.left()

    def begin(self) -> None:
        """Start the time of the next step, after work that belongs to none."""
        self._start = self._limit.clock()

    def may_begin(self) -> bool:
        """Return whether the next step may begin, which starts its time."""
        self.begin()
        self._owed -= 1
        if self._owed >= 0:
            return True
        return self._unlimited or self._limit.allows(self.longest, self._together)

    def done(self, count: int = 1) -> None:
        """Note the end of a step."""
        now = self._limit.clock()
        self.longest = max(self.longest, now - self._start)
        self._start = now
        self._progress(count)
