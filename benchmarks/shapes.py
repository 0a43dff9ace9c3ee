"""How an EAGLE-3 head's drafts fare by their shape: mean acceptance length per task group, and where the time goes.

    python benchmarks/shapes.py --target PATH --head PATH --prompts questions.jsonl

Shapes have a fixed size, so that acceptance can be compared; `default` is the one that costs decide. At T > 0 fixed
trees and chains come drawn from the head's distribution and made of its top tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import machine
import torch
import typer
from prompts import Job, choose, encode, read
from rich.console import Console
from table import number, table
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import DynamicTree, Eagle3Proposer, Report, SpeculativeGenerator
from specdec.eagle3 import Eagle3Head, load

DEPTH = 6
FIXED = (4, 3, 2, 1)  # 4 + 12 + 24 + 24 nodes
log = Console(stderr=True, highlight=False)


def shapes(head: Eagle3Head, temperature: float) -> Iterator[tuple[str, Callable[[], Eagle3Proposer], int | None]]:
    """Name, proposer and draft length."""
    yield "default", lambda: Eagle3Proposer(head), None
    yield "tree of 24", lambda: Eagle3Proposer(head, tree=DynamicTree(depth=DEPTH, top_k=8, size=24)), DEPTH
    yield "tree of 60", lambda: Eagle3Proposer(head, tree=DynamicTree(depth=DEPTH, top_k=10, size=60)), DEPTH
    for name, branching in {"chain": (1,) * DEPTH, f"branching {FIXED}": FIXED}.items():
        for drawn in (False, True) if temperature else (False,):
            ending = ", drawn" if drawn else ", top tokens" if temperature else ""
            yield name + ending, lambda b=branching, d=drawn: Eagle3Proposer(head, branching=b, draw=d), len(branching)


def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the model.")],
    head: Annotated[str, typer.Option(help="Path or hub id of its EAGLE-3 head.")],
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question file (JSONL).", exists=True, dir_okay=False)],
    per_category: Annotated[int, typer.Option(min=1, help="Prompts per group.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    only: Annotated[str, typer.Option(help="Shapes whose name starts with this.")] = "",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Print a table per shape: acceptance by group, and the shares of a round's time."""
    if threads is not None:
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    tokenizer, loaded = AutoTokenizer.from_pretrained(target), load(head)
    jobs = [encode(question, tokenizer) for question in choose(read(prompts, coding_apart=True), per_category)]
    groups = list(dict.fromkeys(job.group for job in jobs))
    lines = []
    for name, make, length in shapes(loaded, temperature):
        if name.startswith(only):
            spec = SpeculativeGenerator(model, make(), draft_length=length)
            lines.append(row(name, spec, jobs, groups, max_new_tokens, temperature))
            log.print(lines[-1])
    of = machine.describe()
    print(
        f"T = {temperature:g}, {max_new_tokens} new tokens, {len(jobs)} prompts; {of['cpu']}, {of['threads']} threads\n"
    )
    print(table(["shape", *groups, "mean of groups", "nodes", "draft", "making + accepting"], lines))


def row(
    name: str,
    spec: SpeculativeGenerator,
    jobs: list[Job],
    groups: list[str],
    max_new_tokens: int,
    temperature: float,
) -> list[str]:
    """Mean acceptance lengths pooled over each group's rounds."""
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    reports = {group: Report() for group in groups}
    for job in jobs:
        torch.manual_seed(0)
        spec.generate(
            job.prompts[0][None],
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            repetition_penalty=1.0,
            **sampling,
        )
        reports[job.group].add(spec.last_report)
    lengths = [report.mean_acceptance_length for report in reports.values()]
    whole = spec.report
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
    typer.run(main)
