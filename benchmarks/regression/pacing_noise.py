"""Simulated speed-ups while other programs use the machine.

    python -m benchmarks.regression.pacing_noise

Recorded costs and slowdowns, and simulated texts (`tests/support/simulated.py`), no model and no clock: the same on
every machine. Speed-ups compare the work that was done, so plain decoding meets the same slowdown.
"""

from __future__ import annotations

from statistics import geometric_mean

import typer

from benchmarks.harness.table import table
from tests.support.simulated import CALLS, HOPELESS, KINDS, TABLES, TEXTS, TOKENS, over_all, speedups
from tests.support.slowdowns import SLOWDOWNS, quiet


def main() -> None:
    rows = []
    for name, slowdown in {"quiet": quiet, **SLOWDOWNS}.items():
        calls = {
            (kind, costs, text): speedups(kind, costs, texts, slowdown=slowdown)
            for kind in KINDS
            for costs in TABLES
            for text, texts in (TEXTS | HOPELESS).items()
        }
        cases = {case: over_all(each) for case, each in calls.items()}
        paying = geometric_mean(speed for case, speed in cases.items() if case[2] in TEXTS)
        slow = sum(speed < 0.97 for speed in cases.values())
        slow_calls = sum(speed < 0.97 for each in calls.values() for speed in each)
        rows.append([name, f"{paying:.3f}", f"{min(cases.values()):.3f}", str(slow), str(slow_calls)])
    print(table(["machine", "drafts that pay", "slowest case", "cases below 0.97", "calls below 0.97"], rows))
    print(f"\n{len(cases)} cases of {CALLS} calls of {TOKENS} tokens on each machine.")


if __name__ == "__main__":
    typer.run(main)
