"""`Stopwatch`: the seconds of each stage of a round, on the host or by events on a device."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from specdec.engine.report import Report
from specdec.utils.timing import clock


class Stopwatch:
    """Adds the wall time between its marks to a report's phases.

    A device that works on its own has only been asked by the time of a mark: an event is put into its queue there, and
    read at the next mark that the host comes to after a wait.

    Args:
        device: of the target.
    """

    def __init__(self, report: Report, device: torch.device | None = None):
        self.report = report
        self._device = device if device is not None and device.type not in ("cpu", "meta") else None
        self.start = self._last = perf_counter()
        self._clock = clock()
        self._took: dict[str, float] = {}  # since the last `mark_end`, by phase
        self._events: list[tuple[str, Any]] = [] if self._device is None else [("", self._event())]
        self._next: list[tuple[str, Any]] = []  # with which the next round begins

    def mark(self, phase: str) -> None:
        """This phase is over; on a device that works on its own, all of it is asked for."""
        if self._device is None:
            self._book(phase)
        else:
            self._events.append((phase, self._event()))
            self._next = []

    def mark_next(self) -> None:
        """What a device is asked for from here on, before the end of this round, is the next one's."""
        if self._device is not None:
            self._next = [("", self._event())]

    def mark_end(self, phase: str) -> dict[str, float]:
        """This phase is over, and the device has got to the last mark: it was waited for.

        Returns:
            seconds of this phase and of those marked since the last end, less what was lost to trying (`clock`).
        """
        for (_, before), (earlier, event) in zip(self._events, self._events[1:], strict=False):
            self._book(earlier, before.elapsed_time(event) / 1e3)
        if self._device is not None:
            self._events = self._next or [("", self._event())]
        self._book(phase)
        took, self._took = self._took, {}
        return took

    def _book(self, phase: str, seconds: float | None = None) -> None:
        """seconds: None for those since the last booking."""
        now, before = perf_counter(), self._clock
        if seconds is None:
            seconds = max(0.0, now - self._last)
            self._last, self._clock = now, clock()
            net = max(0.0, self._clock - before)
        else:  # a device's: its host lost nothing
            self._last, self._clock, net = self._last + seconds, before + seconds, seconds
        self.report.seconds[phase] += seconds
        self._took[phase] = self._took.get(phase, 0.0) + net

    def _event(self) -> Any:
        assert self._device is not None
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self) -> float:
        return perf_counter() - self.start
