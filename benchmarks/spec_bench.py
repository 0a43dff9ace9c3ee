"""Spec-Bench's board for your models: all questions and turns, specdec's proposers beside transformers' own methods.

    python -m benchmarks.spec_bench --target PATH --draft PATH --data question.jsonl --out board

--data may be repeated: Spec-Bench's question file, and GSM8K, HumanEval, MBPP, MT-bench or Alpaca as published (JSONL).
So may --temperature, --batch-size and, for models with a switch for it, --thinking: each combination is a table of
the page OUT/board.md. Finished measurements are kept: the same command goes on where it was stopped. peers.py says how
other libraries' methods come beside these. As the board's protocol has it: tokens/s of each question, prefill included,
over plain `generate()`'s.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging

from benchmarks.compare import Compared, compare
from benchmarks.harness import machine
from benchmarks.harness.failure import bad_input_ends
from benchmarks.harness.methods import catalogue, select
from benchmarks.harness.options import Bench, Options
from benchmarks.harness.summary import MethodSummary, best_of_transformers, spread, summarise
from benchmarks.harness.table import best_lines, number, table, times

METHODS = "hf-*,specdec-*"
# The board's columns, and what its question file calls them.
COLUMNS = {
    "mt_bench": "Multi-turn Conversation",
    "translation": "Translation",
    "summarization": "Summarization",
    "qa": "Question Answering",
    "math_reasoning": "Mathematical Reasoning",
    "rag": "Retrieval-augmented Generation",
}
ALL = 10**6  # questions per group
THINKING = {"": None, "on": True, "off": False}

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the model.")],
    data: Annotated[list[Path], typer.Option(help="Questions (JSONL).", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for results and the page; an earlier run's are taken up.")],
    draft: Annotated[str | None, typer.Option(help="Path or hub id of a draft model.")] = None,
    proposer: Annotated[list[str] | None, typer.Option(help="Another proposer string; may be repeated.")] = None,
    methods: Annotated[str, typer.Option(help="Names, separated by commas; * for any text.")] = METHODS,
    per_category: Annotated[int, typer.Option(min=1, help="Questions of each group; all by default.")] = ALL,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="0 by default; may be repeated.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="1 by default; may be repeated.")] = None,
    thinking: Annotated[list[str] | None, typer.Option(help="on or off; may be repeated.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Shorten longer prompts.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="auto (as saved), bfloat16, float16 or float32.")] = Options.dtype,
    device: Annotated[str, typer.Option()] = Options.device,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pages = [f"# {Path(target).name}" + (f" with {Path(draft).name}" if draft else "")]
    with bad_input_ends():
        modes = [_thinking(mode) for mode in thinking or [""]]
        every = [
            Options(
                target=target,
                draft=draft,
                prompts=path,
                proposers=tuple(proposer or ()),
                per_category=per_category,
                temperature=heat,
                batch_size=size,
                all_turns=size == 1,
                thinking=mode,
                max_new_tokens=max_new_tokens,
                max_prompt_tokens=max_prompt_tokens,
                dtype=dtype,
                device=device,
                threads=threads,
            )
            for path, heat, size, mode in product(data, temperature or [0.0], batch_size or [1], modes)
        ]
        asked = [name for name in methods.split(",") if name]
        boards = [(bench, select(list(catalogue(bench)), asked)) for bench in map(Bench, every)]
        for bench, chosen in boards:
            compared = compare(bench, chosen, repeats, out / _folder(bench.options))
            rows = summarise(compared.records, chosen)
            pages += [_heading(bench), board(compared, rows), best_lines(rows, best_of_transformers(rows))]
            (out / "board.md").write_text("\n\n".join(pages) + "\n")
    print("\n\n".join(pages))


def board(compared: Compared, rows: list[MethodSummary]) -> str:
    """The board's table: a line per method, its speed-ups, #MAT (tokens per row and pass of the target), and between
    which figures nine of ten draws of as many questions lie."""
    groups = list(dict.fromkeys(group for row in rows for group in row.by_group))
    head = ["Models", *(COLUMNS.get(group, group) for group in groups), "#MAT", "Avg.", "90% of draws", "as plain"]
    return table(head, [_line(row, groups, compared) for row in rows])


def _line(row: MethodSummary, groups: list[str], compared: Compared) -> list[str]:
    low, high = spread(compared.records, row.name)
    same = compared.identities.get(row.name)
    return [
        row.name,
        *(times(row.by_group.get(group)) for group in groups),
        number(row.tokens_per_pass),
        times(row.overall),
        f"{low:.2f} to {high:.2f}",
        "-" if same is None else f"{same.compared - len(same.differences)} of {same.compared}",
    ]


def _thinking(mode: str) -> bool | None:
    if mode not in THINKING:
        raise ValueError(f"--thinking is on or off, got {mode!r}")
    return THINKING[mode]


def _folder(options: Options) -> str:
    mode = {None: "", True: "-thinking", False: "-not-thinking"}[options.thinking]
    return f"{options.prompts.stem}-t{options.temperature:g}-b{options.batch_size}{mode}"


def _heading(bench: Bench) -> str:
    options, about = bench.options, machine.describe()
    mode = {None: "", True: ", thinking", False: ", not thinking"}[options.thinking]
    return (
        f"## {options.prompts.stem}: T = {options.temperature:g}, batch {options.batch_size}{mode}\n\n"
        f"{len(bench.questions)} questions, at most {options.max_new_tokens} new tokens; {about['cpu']}, "
        f"{about['usable_cores']} cores, {options.device}, {bench.target.dtype}."
    )


if __name__ == "__main__":
    app()
