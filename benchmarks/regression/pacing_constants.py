"""Sensitivity of pacing to its constants: simulated speed-ups with each of them halved and doubled.

    python -m benchmarks.regression.pacing_constants > benchmarks/results/pacing-constants.md

Recorded costs and simulated texts (`tests/support/simulated.py`), no model and no clock: the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from benchmarks.harness.table import table
from specdec.proposers.pacing import draft_passes, estimates, pacer
from specdec.proposers.pacing.balance import Balance
from specdec.proposers.pacing.pass_cost import PassCost
from tests.support.simulated import CALLS, HOPELESS, KINDS, TABLES, TEXTS, TOKENS, over_all, speedups
from tests.support.slowdowns import SLOWDOWNS, quiet

CONSTANTS: list[tuple[Any, str]] = [
    *((PassCost, name) for name in ("PRIOR", "GROWTH", "TILT", "RECENT", "LEAST", "MOST")),
    *((PassCost, name) for name in ("AGREES", "FAMILIAR", "CONFIRMED")),
    *((estimates.Acceptance, name) for name in ("STEP", "WEIGHT", "LIKE_WEIGHT", "UNKNOWN")),
    *((estimates.Budget, name) for name in ("SHARE", "FIRST", "MOST")),
    *((estimates, name) for name in ("STEPS", "PRIOR_STEP", "MOST_STEP")),
    *((Balance, name) for name in ("SHARE", "LENGTH", "TRIAL")),
    *((pacer, name) for name in ("OUTLIER", "ROUNDS", "LONGEST")),
    (draft_passes, "FEW_TOKENS"),
]
SLOW = ("stalls", "shared")  # besides the quiet machine

KEPT = """`FEW_TOKENS` is kept although no simulated case misses it: it separates reading a prompt from drafting, and no
simulated pass lies near it. `UNKNOWN` and `PRIOR_STEP` stand in until the first observation, which every simulated call
makes before it asks. `MOST_STEP` bounds a draft pass that takes longer than two target passes, as the first one of a
process may. No simulated one does."""


@contextmanager
def scaled(owner: Any, name: str, factor: float) -> Iterator[None]:
    """Multiply a constant; a whole number stays one, and at least one."""
    old = getattr(owner, name)
    setattr(owner, name, max(1, round(old * factor)) if isinstance(old, int) else old * factor)
    try:
        yield
    finally:
        setattr(owner, name, old)


def measured() -> dict[tuple[str, str, str, str], float]:
    """Speed-up over all calls, by the machine's slowdown, kind of proposer, table of costs and text."""
    found = {}
    for name, slowdown in {"quiet": quiet, **{name: SLOWDOWNS[name] for name in SLOW}}.items():
        for kind in KINDS:
            for costs in TABLES:
                for text, calls in (TEXTS | HOPELESS).items():
                    found[name, kind, costs, text] = over_all(speedups(kind, costs, calls, slowdown=slowdown))
    return found


def compared(now: dict[Any, float], before: dict[Any, float]) -> list[str]:
    """Mean change, worst change and slowest case, in percent and as a speed-up."""
    changes = [now[case] / before[case] for case in before]
    mean = math.exp(sum(map(math.log, changes)) / len(changes))
    return [f"{100 * (mean - 1):+.2f}%", f"{100 * (min(changes) - 1):+.1f}%", f"{min(now.values()):.3f}"]


def main() -> None:
    before = measured()
    header, rows = ["constant", "value", "halved: mean", "worst", "slowest", "doubled: mean", "worst", "slowest"], []
    for owner, name in CONSTANTS:
        row = [f"`{owner.__name__.rpartition('.')[2]}.{name}`", f"{getattr(owner, name):g}"]
        for factor in (0.5, 2.0):
            with scaled(owner, name, factor):
                row += compared(measured(), before)
        rows.append(row)
    mean = math.exp(sum(math.log(speed) for speed in before.values()) / len(before))
    print("# Sensitivity of pacing to its constants\n")
    print(f"    {__doc__.splitlines()[2].strip()}\n")
    print(f"{len(before)} simulated cases of {CALLS} calls of {TOKENS} tokens; mean speed-up {mean:.3f}, slowest case")
    print(
        f"{min(before.values()):.3f}. Change of the speed-up with one constant halved or doubled: mean and worst over"
    )
    print("the cases, and the slowest case then.\n")
    print(table(header, rows))
    print(f"\n{KEPT}")


if __name__ == "__main__":
    typer.run(main)
