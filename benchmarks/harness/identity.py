"""Comparison of texts with plain decoding's at T = 0, with the gap between the logits where they diverge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from benchmarks.harness.measure import Record
from benchmarks.harness.prompts import Job
from examples.demo.divergence import Divergence, diverge, first_difference
from specdec.evaluation.methods import PLAIN


@dataclass(frozen=True)
class Difference:
    """A text that differs from plain decoding's. At a `near_tie`, rounding alone can explain the difference."""

    method: str
    job: str
    row: int
    repeat: int
    divergence: Divergence
    near_tie: bool


@dataclass(frozen=True)
class Identity:
    """Comparison of one method's texts with plain decoding's."""

    compared: int
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        same = f"{self.compared - len(self.differences)} of {self.compared}"
        if not self.differences:
            return same
        far = [difference for difference in self.differences if not difference.near_tie]
        gaps = sorted(d.divergence.gap for d in self.differences)
        shown = ", ".join(f"{gap:.3f}" for gap in gaps[-5:])
        kind = f"{len(far)} not at near ties" if far else "the others part at near ties"
        return f"{same}; {kind}: gaps {'up to ' if len(gaps) > 5 else ''}{shown}"


def compare_texts(records: Sequence[Record], jobs: Sequence[Job], target: PreTrainedModel) -> dict[str, Identity]:
    """Compare texts by method with plain decoding's first repeat. Each difference costs a pass of the target."""
    plain = {
        record.job: record.measurement.tokens for record in records if record.method == PLAIN and record.repeat == 0
    }
    prompts = {job.id: job.prompts for job in jobs}
    known: dict[tuple[str, int, int, int | None], Divergence] = {}  # many methods part at the same place
    compared: dict[str, int] = {}
    found: dict[str, list[Difference]] = {}
    for record in records:
        if record.job not in plain or record.job not in prompts:
            continue
        for row, (ours, theirs) in enumerate(zip(record.measurement.tokens, plain[record.job], strict=True)):
            compared[record.method] = compared.get(record.method, 0) + 1
            index = first_difference(theirs, ours)
            if index is None:
                continue
            place = (record.job, row, index, ours[index] if index < len(ours) else None)
            if place not in known:
                prompt = prompts[record.job][row][None].to(target.device)
                divergence = diverge(target, prompt, theirs, ours)
                assert divergence is not None
                known[place] = divergence
            near_tie = known[place].near_tie(target.dtype)
            difference = Difference(record.method, record.job, row, record.repeat, known[place], near_tie)
            found.setdefault(record.method, []).append(difference)
    return {name: Identity(count, tuple(found.get(name, ()))) for name, count in compared.items()}


def same_with_the_seed(records: Sequence[Record]) -> dict[str, tuple[int, int]]:
    """For each method: number of sampled texts that equal plain decoding's with the same seed, and of all compared."""
    plain = {(r.job, r.repeat): r.measurement.tokens for r in records if r.method == PLAIN}
    found: dict[str, tuple[int, int]] = {}
    for record in records:
        if record.method == PLAIN or (record.job, record.repeat) not in plain:
            continue
        same, compared = found.get(record.method, (0, 0))
        for ours, theirs in zip(record.measurement.tokens, plain[record.job, record.repeat], strict=True):
            same, compared = same + (ours == theirs), compared + 1
        found[record.method] = same, compared
    return found
