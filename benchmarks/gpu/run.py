"""Runs parts one after the other in this process. A part that fails or takes too long does not end the run."""

from __future__ import annotations

import faulthandler
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu.parts import Part
from benchmarks.gpu.results import Results
from benchmarks.gpu.setting import Setting

AGAIN = 5.0  # seconds after which an alarm that something swallowed is raised again
GRACE = 25.0  # seconds after a part's limit until a process that does not react is ended


class OutOfTime(BaseException):
    """Raised by the alarm. Not an `Exception`, so that nothing takes it for a failed capture or compilation."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in this context, which runs in the main thread, after some seconds."""

    def alarm(*_: Any) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, alarm)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@contextmanager
def ended_if_hanging(results: Results, seconds: float) -> Iterator[None]:
    """End the process if this context is not left: a hanging call into CUDA holds back every Python signal.

    The stacks of all threads are then in hanging.txt.
    """
    with (results.folder / "hanging.txt").open("w") as file:
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
    (results.folder / "hanging.txt").unlink()


def run_parts(
    setting: Setting,
    results: Results,
    parts: Mapping[str, tuple[float, Part]],
    seconds: float,
    say: Callable[[str], Any] = print,
) -> None:
    """Run parts and write the tables after each.

    Args:
        setting: device, sizes and models.
        results: where rows and tables go.
        parts: seconds and function of each part, by name, in the order in which they run.
        seconds: limit of all parts together.
        say: called with a line after each part.
    """
    end = perf_counter() + seconds
    for name, (most, part) in parts.items():
        start = perf_counter()
        failure = "no time was left" if end <= start else run_part(setting, results, name, part, min(most, end - start))
        lost = recover(setting)
        if failure or lost:
            results.note({"part": name, "failure": failure or lost})
        results.note({"part": name, "took": perf_counter() - start})
        results.write_tables()
        say(f"{name}: {failure or lost or 'done'} ({perf_counter() - start:.0f} s)")
        if lost:
            say(f"stopped: {lost}")
            return


def run_part(setting: Setting, results: Results, name: str, part: Part, seconds: float) -> str:
    """Run a part and note its rows; return why it failed, or an empty string."""
    setting.end = perf_counter() + seconds
    try:
        with ended_if_hanging(results, seconds + GRACE), time_limit(seconds):
            for row in part(setting):
                results.note({"part": name, **row})
    except OutOfTime:
        return f"not done within {seconds:.0f} s"
    except Exception as error:
        (results.folder / f"failure-{name}.txt").write_text(traceback.format_exc())
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def recover(setting: Setting) -> str:
    """Leave streams and captures that a failed part is still in; return why the device cannot be used any more."""
    if not setting.cuda:
        return ""
    try:
        torch.cuda.set_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
        torch.ones(1, device=setting.device).item()
    except Exception as error:
        return f"the device is lost to this process: {' '.join(str(error).split())[:200]}"
    return ""


def chosen(names: Sequence[str], parts: Mapping[str, tuple[float, Part]]) -> dict[str, tuple[float, Part]]:
    """Return the parts with these names, in this order; without names all of them.

    Raises:
        ValueError: no part has such a name.
    """
    for name in names:
        if name not in parts:
            raise ValueError(f"no part is called {name!r}; there are {', '.join(parts)}")
    return {name: parts[name] for name in names or parts}
