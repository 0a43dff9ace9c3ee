"""Run Spec-Bench on your models: all questions and turns, with specdec's proposers and transformers' own methods.

    python -m benchmarks.spec_bench --target PATH --draft PATH --data question.jsonl --out board

--data may be repeated: Spec-Bench's question file, and GSM8K, HumanEval, MBPP, MT-bench or Alpaca as published (JSONL).
So may --temperature, --batch-size and, for models that support it, --thinking: each combination is a table of the page
OUT/board.md. Finished measurements are kept: run the same command again to resume. peers.py describes how to add
methods of other libraries. As in Spec-Bench's protocol, speed-ups are tokens/s of each question, including prefill,
over those of plain `generate()`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.compare import Comparison, compare
from benchmarks.harness import machine
from benchmarks.harness.methods import catalogue, select
from benchmarks.harness.options import Bench, Options
from benchmarks.harness.script import Dtype, MaxPromptTokens, Threads, bad_input_ends
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
    data: Annotated[
        list[Path], typer.Option(help="File of questions (JSONL); may be repeated.", exists=True, dir_okay=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for results and the page. An earlier run in it is resumed.")],
    draft: Annotated[str | None, typer.Option(help="Path or hub id of a draft model.")] = None,
    proposer: Annotated[list[str] | None, typer.Option(help="Further proposer; may be repeated.")] = None,
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas; * for any text.")] = METHODS,
    per_category: Annotated[int, typer.Option(min=1, help="Questions per group. Default: all.")] = ALL,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="Sampling temperature, 0 by default; may be repeated.")
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts per call, 1 by default; may be repeated.")
    ] = None,
    thinking: Annotated[list[str] | None, typer.Option(help="Thinking, on or off; may be repeated.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    max_prompt_tokens: MaxPromptTokens = None,
    repeats: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Dtype = Options.dtype,
    device: Annotated[str, typer.Option()] = Options.device,
    threads: Threads = None,
) -> None:
    pages = [f"# {Path(target).name}" + (f" with {Path(draft).name}" if draft else "")]
    with bad_input_ends():
        if unknown := [mode for mode in thinking or () if mode not in THINKING]:
            raise ValueError(f"--thinking is on or off, got {unknown[0]!r}")
        modes = [THINKING[mode] for mode in thinking or [""]]
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
        patterns = [name for name in methods.split(",") if name]
        boards = [(bench, select(list(catalogue(bench)), patterns)) for bench in map(Bench, every)]
        for bench, chosen in boards:
            compared = compare(bench, chosen, repeats, out / _folder(bench.options))
            rows = summarise(compared.records, chosen)
            pages += [_heading(bench), board(compared, rows), best_lines(rows, best_of_transformers(rows))]
            (out / "board.md").write_text("\n\n".join(pages) + "\n")
    print("\n\n".join(pages))


def board(compared: Comparison, rows: list[MethodSummary]) -> str:
    """Format the table with a line per method: speed-ups, #MAT and 90% intervals, bootstrapped over questions.

    #MAT is the mean of the tokens per row and pass of the target.
    """
    groups = list(dict.fromkeys(group for row in rows for group in row.by_group))
    head = ["Models", *(COLUMNS.get(group, group) for group in groups), "#MAT", "Avg.", "90% of draws", "as plain"]
    return table(head, [_line(row, groups, compared) for row in rows])


def _line(row: MethodSummary, groups: list[str], compared: Comparison) -> list[str]:
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
