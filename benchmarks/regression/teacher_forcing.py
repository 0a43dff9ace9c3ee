"""Measure the draft length accepted from heads with teacher forcing on the target's answers, by group of questions.

    python -m benchmarks.regression.teacher_forcing --target PATH --head eagle3:PATH --prompts questions.jsonl \\
        --answers out.jsonl

A chain is drafted after every position of the target's greedy answers, in a few passes over the text. This takes
minutes instead of an hour of decoding, uses the same positions for all heads, and gives the same counts on any machine.
At T = 1 the length is computed from the acceptance probabilities of the chain's tokens. Answers are kept in --answers,
and are not generated again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.harness.options import Bench, Options
from benchmarks.harness.prompts import Job
from benchmarks.harness.script import Dtype, MaxPromptTokens, Threads
from benchmarks.harness.table import number, table
from specdec import SpeculativeGenerator
from specdec.heads.kinds import Head
from specdec.models.hidden_states import Taps
from specdec.proposers.factory import as_proposer
from specdec.training.evaluate import drafted_logits
from specdec.training.teacher.base import taps_of

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    head: Annotated[
        list[str], typer.Option(help='Head, in the format of a proposer: "eagle3:PATH", "dflash:PATH" or "eagle3".')
    ],
    prompts: Annotated[Path, typer.Option(help="File of questions (JSONL).", exists=True, dir_okay=False)],
    answers: Annotated[Path, typer.Option(help="File to keep the target's answers (JSONL).", dir_okay=False)],
    per_category: Annotated[int, typer.Option(min=1, help="Prompts per group.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 200,
    max_prompt_tokens: MaxPromptTokens = None,
    draft_length: Annotated[int, typer.Option(min=1, help="Draft tokens per chain.")] = 5,
    dtype: Dtype = "float32",
    threads: Threads = None,
) -> None:
    bench = Bench(
        Options(
            target,
            prompts,
            per_category=per_category,
            coding_apart=True,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            threads=threads,
        )
    )
    written = answers_of_jobs(bench, bench.jobs, head[0], answers)
    groups = sorted({job.group for job in bench.jobs})
    rows = []
    for name in head:
        found = of_groups(as_proposer(name, bench.target).head, bench.target, bench.jobs, written, draft_length)
        mean = torch.stack([found[group] for group in groups]).nanmean(0)  # all of a group may be too short
        rows.append([name, *(_both(found[group]) for group in groups), _both(mean)])
    print(table(["head", *groups, "mean"], rows))


def _both(lengths: Tensor) -> str:
    return " / ".join(number(length) for length in lengths.tolist())


def answers_of_jobs(bench: Bench, jobs: Sequence[Job], proposer: str, file: Path) -> dict[str, list[int]]:
    """Answers by job id, in the order of the file. The target's text does not depend on the proposer."""
    written = {}
    if file.exists():
        written = {entry["id"]: entry["tokens"] for entry in map(json.loads, file.read_text().splitlines())}
    generator = SpeculativeGenerator(bench.target, proposer)
    with file.open("a") as out:
        for job in jobs:
            if job.id not in written:
                prompt = job.prompts[0]
                text = generator.generate(prompt[None], **bench.options.generate_arguments)[0]
                written[job.id] = text[len(prompt) :].tolist()
                print(json.dumps({"id": job.id, "tokens": written[job.id]}), file=out, flush=True)
    return written


def of_groups(
    head: Head, target: PreTrainedModel, jobs: list[Job], answers: Mapping[str, list[int]], steps: int
) -> dict[str, Tensor]:
    """Mean tokens per round of a chain at T = 0 and T = 1, (2,) by group, including the recovered or bonus token."""
    sums: dict[str, Tensor] = {}
    for job in jobs:
        prompt = job.prompts[0]
        text = torch.cat([prompt, prompt.new_tensor(answers[job.id])])
        sums[job.group] = sums.get(job.group, torch.zeros(3)) + _of_text(head, target, text, len(prompt), steps)
    return {group: 1 + total[:2] / total[2] for group, total in sums.items()}


@torch.no_grad()
def _of_text(head: Head, target: PreTrainedModel, text: Tensor, prompt: int, steps: int) -> Tensor:
    """Count one answer, (3,): accepted tokens at T = 0, accepted tokens at T = 1, and positions.

    A position counts if `steps` tokens follow it.
    """
    first, last = prompt - 1, len(text) - 1 - steps  # token `first` + 1 is the answer's first one
    places = max(0, last - first)
    chances = torch.zeros(2, steps, places)
    assert head.draft_to_target is not None
    listener = Taps(target, taps_of(head, target), head.device)
    with listener.listening() as taken:
        p = target(text[None], use_cache=False, logits_to_keep=len(text) - first).logits[0].float().softmax(-1)
    states = listener.features(taken)
    for step, logits in enumerate(drafted_logits(head, target, text, states, steps, first)):
        q, asked = logits[first:last].float().softmax(-1), slice(1 + step, places + 1 + step)
        chances[0, step] = head.draft_to_target[q.argmax(-1)] == text[first + 2 + step : last + 2 + step]
        chances[1, step] = torch.minimum(p[asked][:, head.draft_to_target], q).sum(-1)
    return torch.tensor([*chances.cumprod(1).sum((1, 2)).tolist(), places])


if __name__ == "__main__":
    app()
