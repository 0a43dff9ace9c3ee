"""Measure the overhead of specdec: draft length 0 against plain decoding, and the parts of a round's time.

    python -m benchmarks.regression.overhead --target PATH

Draft length 0 is specdec's plain decoding: the ratio to `generate()` should be 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

from benchmarks.harness.measure import take_turns
from benchmarks.harness.prompts import Job
from benchmarks.harness.script import Dtype, Threads, conditions, load, prepare
from benchmarks.harness.summary import summarise
from benchmarks.harness.table import number, percent, table, times
from specdec import NgramProposer, Report
from specdec.data.prompts import PROMPTS
from specdec.evaluation.methods import PLAIN, plain, speculative
from specdec.evaluation.timing import pooled

LENGTH_0 = "specdec, draft length 0"
PROMPT = PROMPTS[-1]  # a text to rewrite: n-grams are found in it

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of any causal LM.")],
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 4,
    draft_length: Annotated[
        int, typer.Option(min=1, help="Tokens per n-gram draft in the measurement of a round's parts.")
    ] = 7,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option()] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Markdown file to write, too.")] = None,
) -> None:
    prepare(threads)
    model = load(target, dtype, device)
    prompt = PROMPT.encode(AutoTokenizer.from_pretrained(target))["input_ids"][0]
    job = Job(PROMPT.name, PROMPT.name, (prompt,))
    given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "repetition_penalty": 1.0}
    greedy = given | {"do_sample": False}
    sampled = given | {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    pair = [plain(model), speculative(LENGTH_0, model, NgramProposer(), 0)]
    rows = summarise(take_turns(pair, model, [job], greedy, repeats), [PLAIN, LENGTH_0])
    lines = [[row.name, number(1e3 * row.time_per_output_token), times(row.overall), times(row.decode)] for row in rows]
    length_0 = table(["method", "ms/token", "speed", "speed, decode only"], lines)

    split = []
    for name, arguments in (("T = 0", greedy), ("T = 1", sampled)):
        method = speculative(name, model, NgramProposer(), draft_length)
        records = take_turns([method], model, [job], arguments, repeats)
        split.append([name, *_shares(pooled(record.measurement.report for record in records))])
    head = (
        "|ms/round|rounds with a draft|tokens/round|verify|draft|accept|other|accept and other|outside the model".split(
            "|"
        )
    )
    text = "\n\n".join(
        [
            f"# Overhead: {Path(target).name}",
            f"{conditions(model, max_new_tokens)}, {repeats} repeats, side by side.",
            "Draft length 0 against plain `generate()` (median over repeats):",
            length_0,
            f"Where a round's time goes, n-gram drafts of {draft_length} tokens (drafting runs no model here):",
            table(head, split),
        ]
    )
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def _shares(report: Report) -> list[str]:
    spent = {phase: report.seconds[phase] for phase in ("verify", "draft", "accept", "other")}
    whole = sum(spent.values())
    return [
        number(1e3 * whole / report.num_rounds),
        percent(report.num_drafts, report.num_rounds),
        number(report.tokens_per_round),
        *(percent(seconds, whole) for seconds in spent.values()),
        percent(report.overhead, 1),
        percent(whole - spent["verify"], whole),
    ]


if __name__ == "__main__":
    app()
