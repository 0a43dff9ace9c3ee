"""Kernels of replayed rounds: which run on the device, how often and how long, and when it is idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.gpu.calls import on_each_round, warned, write
from benchmarks.gpu.setting import Row, Setting
from benchmarks.harness.table import number, table
from specdec import SpeculativeGenerator

SKIPPED, PROFILED = 5, 8  # rounds of a call: those that capture or settle, then those that are profiled
LISTED = 12  # kernels in results.md; the file has all of them
LAUNCHES = ("LaunchKernel", "GraphLaunch", "Memcpy", "Memset")  # parts of the names of launches on the host
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
Interval = tuple[float, float]  # start and end in microseconds


@dataclass
class RoundProfile:
    """Kernels of a number of rounds.

    Attributes:
        rounds: number of rounds.
        kernels: start and end of every run of a kernel, by its name.
        calls: calls of CUDA on the host, by name.
    """

    rounds: int
    kernels: dict[str, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def runs(self) -> list[Interval]:
        return sorted(run for runs in self.kernels.values() for run in runs)

    @property
    def busy_ms(self) -> float:
        """Milliseconds a round in which at least one kernel runs."""
        return sum(end - start for start, end in joined(self.runs)) / 1e3 / self.rounds

    @property
    def idle_ms(self) -> float:
        """Milliseconds a round between the first kernel and the last one in which none runs."""
        spans = joined(self.runs)
        return (spans[-1][1] - spans[0][0]) / 1e3 / self.rounds - self.busy_ms if spans else 0.0

    def per_round(self, *names: str) -> float:
        """Calls a round of the host's functions whose names contain one of `names`."""
        return sum(count for name, count in self.calls.items() if any(part in name for part in names)) / self.rounds

    def by_name(self) -> list[Row]:
        """Count and time of each kernel per round, the longest first."""
        rows = [
            {
                "kernel": name.replace("|", " "),
                "ms a round": sum(end - start for start, end in runs) / 1e3 / self.rounds,
                "times a round": len(runs) / self.rounds,
                "us each": sum(end - start for start, end in runs) / len(runs),
            }
            for name, runs in self.kernels.items()
        ]
        return sorted(rows, key=lambda row: -row["ms a round"])


def joined(runs: Sequence[Interval]) -> list[Interval]:
    """Join sorted intervals that overlap.

    Examples:
        >>> joined([(0, 2), (1, 3), (5, 6)])
        [(0, 3), (5, 6)]
    """
    out: list[Interval] = []
    for start, end in runs:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def profiled_rounds(setting: Setting, spec: SpeculativeGenerator, ids: Tensor) -> RoundProfile:
    """Profile some rounds in the middle of a call. Earlier calls must have captured them."""
    kind = ProfilerActivity.CUDA if setting.cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]):  # the first one of a process takes seconds
        torch.ones(1, device=setting.device).add_(1)
    profile = torch.profiler.profile(activities=[kind])
    seen: list[float] = []

    def after_round(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) in (SKIPPED, SKIPPED + PROFILED):
            setting.synchronize()
            (profile.start if len(seen) == SKIPPED else profile.stop)()

    try:
        with on_each_round(after_round):
            write(spec, ids, setting.new_tokens)
    finally:
        if SKIPPED <= len(seen) < SKIPPED + PROFILED:  # another profile could not be started otherwise
            profile.stop()
    if len(seen) < SKIPPED + PROFILED:
        raise ValueError(f"a call has {len(seen)} rounds, {SKIPPED + PROFILED} are needed: give --new-tokens")
    return read(profile.events() or [], PROFILED, setting.cuda)


def read(events: Sequence[Any], rounds: int, cuda: bool) -> RoundProfile:
    """Sort the events of a profile. On a CPU, operations that call no others count as kernels."""
    out = RoundProfile(rounds)
    for event in events:
        run = (event.time_range.start, event.time_range.end)
        if event.device_type == (DeviceType.CUDA if cuda else DeviceType.CPU) and (cuda or not event.cpu_children):
            out.kernels[event.name].append(run)
        elif cuda:
            out.calls[event.name] += 1
    return out


def kernel_rows(
    setting: Setting, name: str, spec: SpeculativeGenerator, ids: Tensor, median_round_ms: float
) -> Iterator[Row]:
    """Yield a summary and the longest kernels, and write all of them to a file. Without a profile, yield the reason.

    Args:
        setting: device and sizes.
        name: name of the method.
        spec: generator whose calls on `ids` have captured their rounds.
        ids: (B, T) int64, prompts.
        median_round_ms: duration of a round without the profiler.
    """
    kind, after = "device and host in replayed rounds", list[float]()
    try:
        with warned() as texts:
            profile = profiled_rounds(setting, spec, ids)
            with on_each_round(after.append):
                write(spec, ids, setting.new_tokens)
    except Exception as error:  # what else the part measures does not depend on the profile
        yield {"table": kind, "method": name, "failure": f"profile: {type(error).__name__}: {error}"}
        return
    rows = profile.by_name()
    summary: Row = {
        "table": kind,
        "method": name,
        "kernels a round": len(profile.runs) / profile.rounds,
        "busy ms": profile.busy_ms,
        "median round ms": median_round_ms,
        "after the profile": 1e3 * median(after),
        "idle share": 1 - profile.busy_ms / median_round_ms,
        "idle ms, profiled": profile.idle_ms,
        "launches a round": profile.per_round(*LAUNCHES),
        "graph launches a round": profile.per_round("GraphLaunch"),
        "waits a round": profile.per_round(*WAITS),
    }
    yield summary | ({"warned": texts} if texts else {})
    file = setting.out / f"kernels-{name.replace(' ', '-').replace(',', '')}.md"
    calls = [[name, number(count / profile.rounds)] for name, count in sorted(profile.calls.items())]
    lines = [[row["kernel"], *(number(row[key]) for key in list(row)[1:])] for row in rows]
    parts = [f"# Kernels of {name}: {profile.rounds} replayed rounds", table(list(rows[0]), lines) if rows else "none"]
    file.write_text("\n\n".join([*parts, table(["call on the host", "times a round"], calls)]) + "\n")
    for row in rows[:LISTED]:
        yield {"table": f"longest kernels of {name}", **row, "kernel": short(row["kernel"])}


def short(name: str) -> str:
    """Shorten a kernel's name for the table: without its namespaces and with at most 90 characters."""
    for noise in ("void ", "at::native::", "(anonymous namespace)::", "c10::", "std::"):
        name = name.replace(noise, "")
    return name if len(name) <= 90 else name[:60] + " ... " + name[-25:]
