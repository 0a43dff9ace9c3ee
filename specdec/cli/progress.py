"""`progress_bar`: how far a command is, as a bar on a terminal and as a line now and then in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from specdec.cli.common import print_message

PERIOD = 30.0  # seconds between two lines


@contextmanager
def progress_bar(title: str, enabled: bool = True) -> Iterator[Callable[..., None]]:
    """Show the progress of a command on standard error: a bar on a terminal, else lines (see `ProgressLines`).

    Yields:
        A function to call with the numbers of finished and of all steps, and optionally a note to show next to them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(title).update if enabled else lambda done, total, note="": None
        return
    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not enabled) as bar:
        task = bar.add_task("", total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)


class ProgressLines:
    """Progress as lines for a log, at most one per 30 seconds.

    Args:
        title: first word of each line.
        clock: returns the time in seconds.

    Examples:
        >>> lines = ProgressLines("measuring", clock=iter([0.0, 0.0, 40.0]).__next__)
        >>> lines.update(0, 60)
        >>> lines.update(20, 60)  # prints "measuring: 20 of 60, about 1 min 20 s left" on standard error
    """

    def __init__(self, title: str, clock: Callable[[], float] = monotonic):
        self._title, self._clock = title, clock
        self._begun = self._printed = clock()
        self._first: int | None = None  # steps that were done before

    def update(self, done: int, total: int | None, note: str = "") -> None:
        """Print a line if it is due.

        Args:
            done: number of finished steps.
            total: number of all steps; None if it is not known.
            note: shown at the end of the line.
        """
        now = self._clock()
        self._first = done if self._first is None else self._first
        if now - self._printed < PERIOD:
            return
        self._printed = now
        parts = [f"{self._title}: {done:,}" if total is None else f"{self._title}: {done:,} of {total:,}"]
        if total is not None and self._first < done < total:
            parts.append(f"about {_duration((now - self._begun) / (done - self._first) * (total - done))} left")
        print_message(", ".join(parts + [note] * bool(note)))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
