"""Compare draft shapes of an EAGLE-3 head: mean acceptance length per task group, and the parts of a round's time.

    python -m benchmarks.regression.shapes --target PATH --head PATH --prompts questions.jsonl --out results

Shapes have a fixed size, so that acceptance can be compared; `default` adapts its size to costs. At T > 0 fixed trees
and chains are measured both with tokens sampled from the head and with its top tokens. Measurements are kept in --out:
run the same command again to resume, or add prompts or shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness import machine
from benchmarks.harness.measure import Record, measure_job
from benchmarks.harness.options import Bench, Options
from benchmarks.harness.script import Threads, bad_input_ends, log
from benchmarks.harness.store import Store
from benchmarks.harness.table import number, table
from specdec import DynamicTree, Eagle3Proposer
from specdec.evaluation.methods import speculative
from specdec.evaluation.timing import pooled
from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.head import Eagle3Head

DEPTH = 6
FIXED = (4, 3, 2, 1)  # 4 + 12 + 24 + 24 nodes
app = typer.Typer(add_completion=False)


def shapes(head: Eagle3Head, temperature: float) -> Iterator[tuple[str, Callable[[], Eagle3Proposer], int | None]]:
    """Yield the name, proposer factory and draft length of each shape."""
    yield "default", lambda: Eagle3Proposer(head), None
    yield "tree of 24", lambda: Eagle3Proposer(head, tree=DynamicTree(depth=DEPTH, top_k=8, size=24)), DEPTH
    yield "tree of 60", lambda: Eagle3Proposer(head, tree=DynamicTree(depth=DEPTH, top_k=10, size=60)), DEPTH
    for name, branching in {"chain": (1,) * DEPTH, f"branching {FIXED}": FIXED}.items():
        for drawn in (False, True) if temperature else (False,):
            ending = ", drawn" if drawn else ", top tokens" if temperature else ""
            yield name + ending, lambda b=branching, d=drawn: Eagle3Proposer(head, branching=b, draw=d), len(branching)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the model.")],
    head: Annotated[str, typer.Option(help="Path or hub id of its EAGLE-3 head.")],
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question file (JSONL).", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for results. An earlier run in it is resumed.")],
    per_category: Annotated[int, typer.Option(min=1, help="Prompts per group.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    only: Annotated[str, typer.Option(help="Measure only shapes whose name starts with this text.")] = "",
    threads: Threads = None,
) -> None:
    bench = Bench(
        Options(
            target=target,
            prompts=prompts,
            per_category=per_category,
            coding_apart=True,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            threads=threads,
        )
    )
    with bad_input_ends():
        loaded = load(head)
        offered = list(shapes(loaded, temperature))
        chosen = [shape for shape in offered if shape[0].startswith(only)]
        if not chosen:
            raise ValueError(f"--only {only!r} is none of the shapes: {', '.join(name for name, _, _ in offered)}")
        jobs = bench.jobs
        Eagle3Proposer(loaded).check(bench.target)
        store = Store(out, bench.options.fingerprinted | {"head": fingerprint(loaded)})
    for name, make, length in chosen:
        method = speculative(name, bench.target, make(), length)
        missing = [job for job in jobs if (name, job.id, 0) not in store.done]
        for count, job in enumerate(missing, start=1):
            taken = measure_job(bench, method, job)
            assert taken.report is not None
            found = taken.report.mean_acceptance_length
            store.append(Record(store.fingerprint, "", name, job.id, job.group, 0, taken))
            log.print(f"{count}/{len(missing)}  {name}, {job.group} {job.id}: {found:.2f}", markup=False)
    groups = list(dict.fromkeys(job.group for job in jobs))
    ids, of = {job.id for job in jobs}, machine.describe()
    records = [record for record in store.records if record.job in ids]
    per_group = ", ".join(f"{group} {sum(job.group == group for job in jobs)}" for group in groups)
    print(
        f"T = {temperature:g}, {max_new_tokens} new tokens; {of['cpu']}, {of['threads']} threads. Prompts: {per_group}"
    )
    print()
    lines = [line(name, [record for record in records if record.method == name], groups) for name, _, _ in chosen]
    print(table(["shape", *groups, "mean of groups", "nodes", "draft", "making + accepting"], lines))


def fingerprint(head: Eagle3Head) -> str:
    """Hash of the head's weights."""
    content = hashlib.sha256()
    for tensor in head.state_dict().values():
        content.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:16]


def line(name: str, records: Sequence[Record], groups: Sequence[str]) -> list[str]:
    """Format a row of the table: a shape's mean acceptance lengths, pooled over the rounds of each group."""
    reports = {g: pooled(r.measurement.report for r in records if r.group == g) for g in groups}
    lengths, whole = [report.mean_acceptance_length for report in reports.values()], pooled(reports.values())
    nodes = whole.num_draft_tokens / max(1, whole.num_drafts)
    return [
        name,
        *(f"{length:.2f}" for length in lengths),
        f"{sum(lengths) / len(lengths):.2f}",
        number(nodes),
        f"{100 * whole.seconds['draft'] / whole.round_seconds:.0f}%",
        f"{100 * whole.building_share:.1f}%",
    ]


if __name__ == "__main__":
    app()
