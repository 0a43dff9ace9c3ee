"""`take_turns`: runs methods in turn (A B A B), so that drift of the machine affects them equally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from benchmarks.harness.measure import measure
from benchmarks.harness.prompts import Job
from benchmarks.harness.store import Record
from specdec.evaluation.methods import Method


def take_turns(
    methods: Sequence[Method],
    target: PreTrainedModel,
    jobs: Sequence[Job],
    arguments: dict[str, Any],
    repeats: int,
) -> list[Record]:
    """Measure every method `repeats` times on every job, after a warm-up call of each."""

    def one(method: Method, job: Job, seed: int) -> Record:
        taken = measure(method, target, job, arguments, pad=0, ends=set(), seed=seed)
        return Record("", "", method.name, job.id, job.group, seed, taken)

    for method in methods:
        one(method, jobs[0], 0)
    return [one(method, job, repeat) for job in jobs for repeat in range(repeats) for method in methods]
