"""specdec beside economize: lookup, a draft model, and both; the same models and questions, taking turns.

    python -m venv peers && peers/bin/pip install -c constraints.txt . typer economize==0.3.2
    peers/bin/python benchmarks/peers.py --target PATH --draft PATH --prompts questions.jsonl --out results

Finished measurements are kept in --out: the same command goes on where it was stopped. economize drafts a fixed number
of tokens per round (its `cycle_length` less one): of several, the one best in the mean of groups counts for each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import machine
import torch
import typer
from measure import take
from methods import PLAIN, Method, speculative
from options import Bench, Options
from store import Record, Store
from summary import MethodSummary, summarise
from table import speed_table, table, times
from transformers.utils import logging

from specdec import DraftModelProposer, HybridProposer, NgramProposer, Proposer

KINDS = ("lookup", "draft", "hybrid")

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the model.")],
    draft: Annotated[str, typer.Option(help="Path or hub id of a draft model.")],
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question file (JSONL).", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for results; an earlier run's are taken up.")],
    per_category: Annotated[int, typer.Option(min=1, help="Prompts per group.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Shorten longer prompts.")] = None,
    kinds: Annotated[str, typer.Option(help="Which to compare.")] = ",".join(KINDS),
    cycles: Annotated[str, typer.Option(help="economize's cycle lengths.")] = "3,5,9",
    dtype: Annotated[str, typer.Option()] = "float32",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options = Options(
        target=target,
        draft=draft,
        prompts=prompts,
        per_category=per_category,
        coding_apart=True,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        dtype=dtype,
        threads=threads,
    )
    bench, store = Bench(options), Store(out, options.fingerprinted)
    chosen = kinds.split(",")
    made = _ours(bench, chosen) | _theirs(bench, chosen, [int(cycle) for cycle in cycles.split(",")])
    methods: dict[str, Method] = {}
    for job in bench.jobs:
        for name, make in made.items():
            if (name, job.id, 0) in store.done:
                continue
            if name not in methods:
                methods[name] = make()
                take(bench, methods[name], bench.warm_up, max_new_tokens=16)
            taken = take(bench, methods[name], job)
            store.append(Record(store.fingerprint, "", name, job.id, job.group, 0, taken))
            print(f"{job.group} {job.id}  {name}: {taken.new_tokens / taken.seconds:.1f} tokens/s", flush=True)
    ids = {job.id for job in bench.jobs}
    rows = summarise([record for record in store.records if record.job in ids], list(made))
    text = _report(bench, rows)
    (out / "results.md").write_text(text + "\n")
    print(text)


def _ours(bench: Bench, kinds: Sequence[str]) -> dict[str, Callable[[], Method]]:
    proposers: dict[str, Callable[[], Proposer]] = {
        "lookup": NgramProposer,
        "draft": lambda: DraftModelProposer(bench.draft),
        "hybrid": lambda: HybridProposer(DraftModelProposer(bench.draft)),
    }

    def method(kind: str) -> Method:
        return speculative(f"specdec {kind}", bench.target, proposers[kind](), None)

    plain = {PLAIN: lambda: Method(PLAIN, bench.target.generate)}
    return plain | {f"specdec {kind}": partial(method, kind) for kind in kinds}


def _theirs(bench: Bench, kinds: Sequence[str], cycles: Sequence[int]) -> dict[str, Callable[[], Method]]:
    def method(kind: str, cycle: int) -> Method:
        return Method(f"economize {kind} {cycle}", _economize(bench, kind, cycle))

    return {f"economize {kind} {cycle}": partial(method, kind, cycle) for kind in kinds for cycle in cycles}


def _economize(bench: Bench, kind: str, cycle: int) -> Callable[..., Any]:
    import economize
    from economize.techniques.draft_model import DraftModelConfig
    from economize.techniques.hybrid import HybridConfig
    from economize.techniques.lookup import LookupConfig

    assert bench.options.draft is not None
    configs = {
        "lookup": lambda: LookupConfig(),
        "draft": lambda: DraftModelConfig(model=bench.options.draft),
        "hybrid": lambda: HybridConfig(fallback=DraftModelConfig(model=bench.options.draft)),
    }
    model = economize.apply(bench.target, configs[kind](), decoding=economize.DecodeConfig(cycle_length=cycle))
    return model.eval().generate  # type: ignore[no-any-return]


def _report(bench: Bench, rows: list[MethodSummary]) -> str:
    lines = []
    for kind in KINDS:
        ours = next((row for row in rows if row.name == f"specdec {kind}"), None)
        theirs = max(
            (row for row in rows if row.name.startswith(f"economize {kind} ")), key=lambda row: row.mean, default=None
        )
        if ours is not None and theirs is not None:
            lines.append([kind, times(ours.mean), times(theirs.mean), theirs.name, times(ours.mean / theirs.mean)])
    options = bench.options
    return "\n\n".join(
        [
            f"# {Path(options.target).name} with {Path(str(options.draft)).name}, specdec beside economize: T = 0",
            f"{machine.cpu_model()}, {torch.get_num_threads()} threads, {options.dtype}; economize "
            f"{version('economize')}, torch {torch.__version__}, {max(row.jobs for row in rows)} questions, "
            f"{options.max_new_tokens} new tokens.",
            "Speed-up over plain `generate()`, prefill included:",
            speed_table(rows, None),
            "Mean of groups, economize at its best cycle length:",
            table(["", "specdec", "economize", "at", "specdec over economize"], lines),
        ]
    )


if __name__ == "__main__":
    app()
