"""`Stopwatch`: seconds of each phase of a round, from the host's clock or from device events."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from specdec.engine.report import Report
from specdec.utils.timing import clock


class Stopwatch:
    """Adds the time between its marks to the phases of a report.

    On an asynchronous device a mark records an event. Its time is read at the next `mark_end`, after a host sync.

    Args:
        report: receives the seconds.
        device: device of the target; None for the CPU.
    """

    def __init__(self, report: Report, device: torch.device | None = None):
        self.report = report
        self._device = device if device is not None and device.type not in ("cpu", "meta") else None
        self.start = self._last = perf_counter()
        self._clock = clock()
        self._took: dict[str, float] = {}  # seconds by phase since the last `mark_end`
        self._events: list[tuple[str, Any]] = [] if self._device is None else [("", self._event())]
        self._next: list[tuple[str, Any]] = []  # first event of the next round, if its work began in this one

    def mark(self, phase: str) -> None:
        """End a phase; on an asynchronous device, after all of its kernels were launched."""
        if self._device is None:
            self._book(phase)
        else:
            self._events.append((phase, self._event()))
            self._next = []

    def mark_next(self) -> None:
        """Count device work launched from here to the end of this round towards the next round."""
        if self._device is not None:
            self._next = [("", self._event())]

    def mark_end(self, phase: str) -> dict[str, float]:
        """End a phase after a host sync, when the device has reached the last mark.

        Returns:
            Seconds by phase since the last `mark_end`, without the time spent on autotuning (`utils.timing.clock`).
        """
        for (_, before), (earlier, event) in zip(self._events, self._events[1:], strict=False):
            self._book(earlier, before.elapsed_time(event) / 1e3)
        if self._device is not None:
            self._events = self._next or [("", self._event())]
        self._book(phase)
        took, self._took = self._took, {}
        return took

    def _book(self, phase: str, seconds: float | None = None) -> None:
        """Add seconds to a phase; None for the host's time since the last booking."""
        now, before = perf_counter(), self._clock
        if seconds is None:
            seconds = max(0.0, now - self._last)
            self._last, self._clock = now, clock()
            net = max(0.0, self._clock - before)
        else:  # device time contains no autotuning of the host
            self._last, self._clock, net = self._last + seconds, before + seconds, seconds
        self.report.seconds[phase] += seconds
        self._took[phase] = self._took.get(phase, 0.0) + net

    def _event(self) -> Any:
        assert self._device is not None
        module = torch.get_device_module(self._device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))  # the current device may be another
        return event

    def elapsed(self) -> float:
        """Seconds since the stopwatch was made."""
        return perf_counter() - self.start
