"""`CallHistory`: what a generator remembers of its calls: reports, traces of rounds and warnings."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import perf_counter

from specdec.engine.hf.hooks import callers_level
from specdec.engine.report import Report
from specdec.engine.trace import RoundTrace
from specdec.utils.releases import note_release


class CallHistory:
    """Reports, traces and warnings of calls, which may run in several threads.

    Attributes:
        total: report over all calls.
        last: report of the call that finished last.
        traces: lists to which the rounds of calls that begin now are appended.
        lock: held while counts change.
    """

    def __init__(self) -> None:
        self.total, self.last = Report(), Report()
        self.traces: tuple[list[RoundTrace], ...] = ()
        self.lock = Lock()
        self._warned: set[str] = set()

    @contextmanager
    def counted(self) -> Iterator[Report]:
        """Yield the report of a call, and add it to `total` when the call ends, also by an error."""
        report, start = Report(num_calls=1), perf_counter()
        try:
            yield report
        except BaseException as error:  # also counts the rounds and tokens of an interrupted call
            report.num_failed_calls, report.total_seconds = 1, perf_counter() - start
            if isinstance(error, Exception):
                note_release(error)
            raise
        finally:
            report.plain_reasons = dict.fromkeys(_merged(report.plain_reasons), 1)
            with self.lock:
                self.last = report
                self.total.add(report)
                self.total.plain_reasons = _merged(self.total.plain_reasons)

    @contextmanager
    def traced(self) -> Iterator[list[RoundTrace]]:
        """Yield a list, to which the rounds of calls are appended that begin within this context."""
        kept: list[RoundTrace] = []
        with self.lock:
            self.traces += (kept,)
        try:
            yield kept
        finally:
            with self.lock:
                self.traces = tuple(other for other in self.traces if other is not kept)

    def warned_of(self, what: str) -> bool:
        """Return whether a message, or a category by its name, was warned of."""
        return what in self._warned

    def warn(self, message: str, category: type[UserWarning] = UserWarning) -> None:
        """Warn once per message, whatever figures are in it; of a category of its own once."""
        key = _without_figures(message) if category is UserWarning else category.__name__
        if not self.warned_of(key):
            self._warned.add(key)
            warnings.warn(f"specdec: {message}", category, stacklevel=callers_level())


def _without_figures(message: str) -> str:
    """The part of a message that does not depend on the lengths of texts: no number that stands alone."""
    return re.sub(r"(?<![\w=.])\d+\b", "", message)


def _merged(reasons: dict[str, int]) -> dict[str, int]:
    """Count reasons that differ in figures alone under the first of them: a server is asked for texts of any length."""
    first: dict[str, str] = {}
    merged: dict[str, int] = {}
    for reason, count in reasons.items():
        name = first.setdefault(_without_figures(reason), reason)
        merged[name] = merged.get(name, 0) + count
    return merged
