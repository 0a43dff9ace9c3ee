"""Summary of measurements: speed-ups by Spec-Bench's protocol, and specdec's pooled reports.

Spec-Bench: tokens/s of each question, prefill included, averaged over questions; the ratio to plain decoding's average
is the speed-up. Repeats of a question count as their median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, median

from benchmarks.harness.measure import Measurement, Record
from benchmarks.harness.methods import SINGLES, TRANSFORMERS
from specdec import Report
from specdec.evaluation.methods import PLAIN
from specdec.evaluation.timing import pooled

DRAWS = 1000  # of the questions, for a bootstrap interval
Figure = Callable[[Measurement], float]


@dataclass(frozen=True)
class MethodSummary:
    """Results of one method.

    Attributes:
        jobs: number of jobs measured with both this method and plain decoding.
        by_group: speed-up over plain decoding for each group.
        overall: speed-up over plain decoding for all jobs.
        decode: overall speed-up for tokens after the first; None if all calls ended with their first tokens.
        mean: mean speed-up over the groups.
        tokens_per_pass: tokens per row and target pass, including prefill; NaN if its forward pass is not called.
        report: specdec's report over all calls; None for other methods.
    """

    name: str
    jobs: int
    by_group: dict[str, float]
    overall: float
    mean: float
    decode: float | None
    tokens_per_second: float
    tokens_per_pass: float
    time_to_first_token: float
    time_per_output_token: float
    report: Report | None


@dataclass(frozen=True)
class Best:
    """Best settings of transformers' assisted generation: one for all groups, and one for each group."""

    single: str
    single_mean: float
    per_group: dict[str, str]
    per_group_mean: float


def summarise(records: Sequence[Record], names: Sequence[str]) -> list[MethodSummary]:
    """Summarise each method in `names` that has results for the same jobs as plain decoding."""
    by_method = {name: [record for record in records if record.method == name] for name in names}
    plain_jobs = _jobs(by_method.get(PLAIN, []))
    rows = []
    for name, own in by_method.items():
        common = _jobs(own) & plain_jobs
        if not common:
            continue
        own = [record for record in own if record.job in common]
        plain = [record for record in by_method[PLAIN] if record.job in common]
        groups = list(dict.fromkeys(record.group for record in own))
        by_group = {
            group: _ratio([r for r in own if r.group == group], [r for r in plain if r.group == group], _speed)
            for group in groups
        }
        at_once = {r.job for r in own + plain if not r.measurement.decode_tokens}
        decoded, plain_decoded = ([r for r in some if r.job not in at_once] for some in (own, plain))
        reports = [record.measurement.report for record in own]
        rows.append(
            MethodSummary(
                name=name,
                jobs=len(common),
                by_group=by_group,
                overall=_ratio(own, plain, _speed),
                mean=fmean(by_group.values()),
                decode=_ratio(decoded, plain_decoded, _decode_speed) if decoded else None,
                tokens_per_second=_average(own, _speed),
                tokens_per_pass=_per_pass(own),
                time_to_first_token=_average(own, lambda m: m.time_to_first_token),
                time_per_output_token=_average(own, lambda m: m.seconds * len(m.tokens) / m.new_tokens),
                report=pooled(reports) if any(reports) else None,
            )
        )
    return rows


def spread(records: Sequence[Record], name: str) -> tuple[float, float]:
    """Bootstrap interval of the speed-up: 5% and 95% quantiles over draws of the questions with replacement."""
    own, plain = (_by_job((r for r in records if r.method == method), _speed) for method in (name, PLAIN))
    jobs, random, found = sorted(own.keys() & plain.keys()), Random(0), []
    for _ in range(DRAWS):
        drawn = random.choices(jobs, k=len(jobs))
        found.append(sum(own[job] for job in drawn) / sum(plain[job] for job in drawn))
    found.sort()
    return found[DRAWS // 20], found[-1 - DRAWS // 20]


def _by_job(records: Iterable[Record], figure: Figure) -> dict[str, float]:
    """Figure of each job, as the median of its repeats."""
    by_job: dict[str, list[float]] = {}
    for record in records:
        by_job.setdefault(record.job, []).append(figure(record.measurement))
    return {job: median(values) for job, values in by_job.items()}


def best_of_transformers(rows: Sequence[MethodSummary]) -> Best | None:
    """Find the best settings of transformers, among those with the most jobs. None if there are no measurements."""
    theirs = [row for row in rows if row.name.startswith(TRANSFORMERS)]
    if not theirs:
        return None
    most = max(row.jobs for row in theirs)
    theirs = [row for row in theirs if row.jobs == most]
    single = max(theirs, key=lambda row: row.mean)
    chosen = {group: max(theirs, key=lambda row: row.by_group[group]) for group in single.by_group}
    return Best(
        single.name,
        single.mean,
        {group: row.name for group, row in chosen.items()},
        fmean(row.by_group[group] for group, row in chosen.items()),
    )


def _speed(m: Measurement) -> float:
    return m.new_tokens / m.seconds


def _decode_speed(m: Measurement) -> float:
    return m.decode_tokens / m.decode_seconds


def _per_pass(records: Sequence[Record]) -> float:
    """Tokens per row and target pass. In single calls each row has its own passes."""
    tokens = passes = 0.0
    for measurement, singles in ((r.measurement, r.method.endswith(SINGLES)) for r in records):
        tokens += measurement.new_tokens / len(measurement.tokens)
        passes += measurement.passes / (len(measurement.tokens) if singles else 1)
    return tokens / passes if passes else float("nan")


def _ratio(own: Sequence[Record], plain: Sequence[Record], figure: Figure) -> float:
    return _average(own, figure) / _average(plain, figure)


def _average(records: Sequence[Record], figure: Figure) -> float:
    return fmean(_by_job(records, figure).values())


def _jobs(records: Sequence[Record]) -> set[str]:
    return {record.job for record in records}
