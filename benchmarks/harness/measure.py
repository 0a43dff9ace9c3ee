"""`measure`: generates one job with one method; `take_turns`: all methods in turn. Times are those of `time_call`."""

from __future__ import annotations

import dataclasses
import json
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.harness.methods import SINGLES
from benchmarks.harness.options import Bench
from benchmarks.harness.prompts import Job, left_padded
from specdec import Report
from specdec.evaluation.methods import Method
from specdec.evaluation.timing import Call, time_call


@dataclass(frozen=True)
class Measurement:
    """Result of a job.

    Attributes:
        tokens: new tokens of each row, up to and including its end token.
        seconds: duration of the whole call, including prefill.
        time_to_first_token: seconds to the first token, the mean if there are several calls.
        decode_seconds: seconds after the first token (or block).
        decode_tokens: number of tokens after the first one (or block).
        passes: forward passes of the target, including prefill.
    """

    tokens: list[list[int]]
    seconds: float
    time_to_first_token: float
    decode_seconds: float
    decode_tokens: int
    passes: int
    report: Report | None = None

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.tokens))


@dataclass(frozen=True)
class Record:
    """A measurement with its settings, method and job.

    Attributes:
        fingerprint: hash of the settings.
        session: start time of the process that measured.
    """

    fingerprint: str
    session: str
    method: str
    job: str
    group: str
    repeat: int
    measurement: Measurement

    @property
    def key(self) -> tuple[str, str, int]:
        return self.method, self.job, self.repeat

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=list)  # reports hold deques

    @classmethod
    def from_json(cls, line: str) -> Record:
        entry = json.loads(line)
        measurement = entry.pop("measurement")
        counts, known = measurement.pop("report"), {field.name for field in dataclasses.fields(Report)}
        report = Report(**{name: count for name, count in counts.items() if name in known}) if counts else None
        return cls(**entry, measurement=Measurement(**measurement, report=report))


def measure(
    method: Method,
    target: PreTrainedModel,
    job: Job,
    arguments: dict[str, Any],
    *,
    pad: int,
    ends: set[int],
    seed: int,
) -> Measurement:
    """Generate from `job` with `method`.

    Args:
        arguments: arguments of `generate()`.
        pad: padding token.
        ends: end tokens.
        seed: seed of torch, set before the call.
    """
    singles = method.name.endswith(SINGLES)
    batches = [[prompt] for prompt in job.prompts] if singles else [job.prompts]
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    torch.manual_seed(seed)
    counted = method.spec is None  # for specdec's captured passes each new hook would be a changed model
    hook = target.register_forward_pre_hook(count) if counted else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' advice on generation flags, once per call
            inputs = [left_padded(prompts, pad, target.device) for prompts in batches]
            calls = [time_call(method, batch, pad_token_id=pad, **arguments) for batch in inputs]
    finally:
        if hook is not None:
            hook.remove()
    texts = [[_until_end(row, ends) for row in call.texts] for call in calls]
    return Measurement(
        tokens=[row for rows in texts for row in rows],
        seconds=sum(call.seconds for call in calls),
        time_to_first_token=sum(call.time_to_first_token for call in calls) / len(calls),
        decode_seconds=sum(call.decode_seconds for call in calls),
        decode_tokens=sum(_after_first(call, rows) for call, rows in zip(calls, texts, strict=True)),
        passes=passes if counted else sum(1 + call.report.num_rounds for call in calls if call.report is not None),
        report=None if singles else calls[0].report,
    )


def measure_job(bench: Bench, method: Method, job: Job, repeat: int = 0, **changed: Any) -> Measurement:
    """Run `measure` with the benchmark's options.

    Args:
        changed: arguments of `generate()` that override the options.
    """
    return measure(
        method,
        bench.target,
        job,
        bench.options.generate_arguments | changed,
        pad=bench.pad_token,
        ends=bench.text_ends,
        # The same for all methods; another in each repeat, so that at T > 0 more than one text is sampled.
        seed=bench.options.seed + 1000 * zlib.crc32(job.id.encode()) + repeat,
    )


def take_turns(
    methods: Sequence[Method], target: PreTrainedModel, jobs: Sequence[Job], arguments: dict[str, Any], repeats: int
) -> list[Record]:
    """Measure every method `repeats` times on every job, in turn, after a warm-up call of each."""

    def one(method: Method, job: Job, seed: int) -> Record:
        method.start(turn=seed)
        taken = measure(method, target, job, arguments, pad=0, ends=set(), seed=seed)
        return Record("", "", method.name, job.id, job.group, seed, taken)

    for method in methods:
        one(method, jobs[0], -1)
    return [one(method, job, repeat) for job in jobs for repeat in range(repeats) for method in methods]


def _after_first(call: Call, texts: Sequence[Sequence[int]]) -> int:
    """Number of tokens after each row's first one, or first block: assisted generation starts with a whole block."""
    first = call.times.count(call.times[0]) // len(texts) if call.times else 0
    return sum(max(0, len(row) - first) for row in texts)


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens
