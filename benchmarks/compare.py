"""Compare speculative decoding with plain decoding and transformers' assisted generation on Spec-Bench's questions.

    python -m benchmarks.compare --target PATH --draft PATH --prompts questions.jsonl --out results

All methods take turns on every prompt in one process, so that drift of the machine affects them equally. Finished
measurements are kept in --out: run the same command again to resume, or add methods, prompts or repeats. Names may
contain `*`: --methods 'hf-*,specdec-draft'.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import machine
from benchmarks.harness.identity import Difference, Identity, compare_texts, same_with_the_seed
from benchmarks.harness.measure import Record, measure_job
from benchmarks.harness.memory import peak_memory
from benchmarks.harness.methods import catalogue, select
from benchmarks.harness.options import Bench, Options
from benchmarks.harness.pass_costs import pass_costs, target_runner
from benchmarks.harness.prompts import Job
from benchmarks.harness.script import Dtype, MaxPromptTokens, Threads, bad_input_ends, log
from benchmarks.harness.store import Store
from benchmarks.harness.summary import best_of_transformers, summarise
from benchmarks.harness.table import best_lines, detail_table, number, speed_table, table, times
from specdec import DraftModelProposer
from specdec.evaluation.methods import PLAIN, Method

WARM_UP_TOKENS = 16
MEMORY_METHODS = (PLAIN, "specdec-ngram", "specdec-draft")

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the model.")],
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question file (JSONL).", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for results. An earlier run in it is resumed.")],
    draft: Annotated[str | None, typer.Option(help="Path or hub id of a draft model.")] = Options.draft,
    per_category: Annotated[int, typer.Option(min=1, help="Prompts per group.")] = Options.per_category,
    coding_apart: Annotated[
        bool, typer.Option(help="Count MT-bench's coding questions as a seventh group.")
    ] = Options.coding_apart,
    all_turns: Annotated[
        bool,
        typer.Option("--all-turns", help="Include further turns of questions, after the answers of plain decoding."),
    ] = Options.all_turns,
    thinking: Annotated[
        bool | None, typer.Option(help="Value of `enable_thinking` for the chat template.")
    ] = Options.thinking,
    max_prompt_tokens: MaxPromptTokens = Options.max_prompt_tokens,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = Options.max_new_tokens,
    full_length: Annotated[
        bool, typer.Option("--full-length", help="Ignore end tokens, so that all texts have the same length.")
    ] = Options.full_length,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = Options.temperature,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per call.")] = Options.batch_size,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas. Default: all.")] = "",
    proposer: Annotated[list[str] | None, typer.Option(help="Further proposer; may be repeated.")] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Further verification rule for specdec's methods, listed as NAME:RULE; may be repeated."),
    ] = None,
    lookup_tokens: Annotated[int, typer.Option(min=1, help="Fixed length of n-gram drafts.")] = Options.lookup_tokens,
    ngram_size: Annotated[int, typer.Option(min=1, help="Longest n-gram to match.")] = Options.ngram_size,
    draft_lengths: Annotated[str, typer.Option(help="Fixed lengths of model drafts, separated by commas.")] = "2,4",
    draft_vocab: Annotated[
        int, typer.Option(min=1, help="Size of the trimmed draft vocabulary.")
    ] = Options.draft_vocab,
    threads: Threads = Options.threads,
    dtype: Dtype = Options.dtype,
    device: Annotated[str, typer.Option()] = Options.device,
    seed: Annotated[int, typer.Option()] = Options.seed,
    pass_cost: Annotated[bool, typer.Option("--pass-costs", help="Only measure passes over 1 to 32 tokens.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Only measure peak memory, in one process per method.")
    ] = False,
) -> None:
    given = locals()
    settings = {field.name: given[field.name] for field in dataclasses.fields(Options) if field.name in given}
    settings["draft_lengths"] = tuple(int(length) for length in draft_lengths.split(",") if length)
    options = Options(**settings, proposers=tuple(proposer or ()), rules=tuple(rule or ()))
    bench, patterns = Bench(options), [name for name in methods.split(",") if name]
    with bad_input_ends():
        chosen = select(list(catalogue(bench)), patterns)
        if pass_cost:
            _write(out, "pass_costs", *_pass_costs(bench))
        if memory:
            _write(out, "memory", *_memory(options, [n for n in chosen if patterns or n in MEMORY_METHODS]))
        if pass_cost or memory:
            return
        identities = compare(bench, chosen, repeats, out).identities
    differing = [name for name, identity in identities.items() if identity.differences]
    if differing and str(bench.target.dtype) == "torch.float32":
        log.print(f"error: in float32 texts must be plain decoding's; {', '.join(differing)} differ", style="red")
        raise typer.Exit(1)


@dataclass(frozen=True)
class Comparison:
    """Measurements, and the comparison of the texts with plain decoding's by method (at T = 0)."""

    records: list[Record]
    identities: dict[str, Identity]


def compare(bench: Bench, chosen: Sequence[str], repeats: int, out: Path) -> Comparison:
    """Take the measurements that are missing in `out`, and write a summary to it."""
    if bench.options.all_turns and bench.options.batch_size > 1:
        raise ValueError("--all-turns measures conversations one by one: leave out --batch-size")
    store = Store(out, bench.options.fingerprinted)
    session = datetime.now(timezone.utc).isoformat(timespec="seconds")
    jobs: list[Job] = []
    stopped = False
    try:
        _run(bench, chosen, repeats, store, session, jobs)
    except KeyboardInterrupt:
        stopped = True
        log.print("\nstopped; finished measurements are kept, run the same command again to resume")
    ids = {job.id for job in jobs}
    records = [record for record in store.records if record.job in ids]
    if not records:
        raise typer.Exit(130)
    identities = compare_texts(records, jobs, bench.target) if bench.options.temperature == 0 else {}
    _report(bench, records, identities, out)
    if stopped:
        raise typer.Exit(130)
    return Comparison(records, identities)


def _run(bench: Bench, chosen: Sequence[str], repeats: int, store: Store, session: str, jobs: list[Job]) -> None:
    """Take the missing measurements, with all methods in turn for each prompt and repeat. Appends prompts to `jobs`."""
    made, ready = catalogue(bench), dict[str, Method]()
    turn, due = 0, bench.jobs
    while due:
        jobs += due
        wanted = [(name, job, repeat) for job in due for repeat in range(repeats) for name in chosen]
        missing = [(name, job, repeat) for name, job, repeat in wanted if (name, job.id, repeat) not in store.done]
        log.print(f"{len(wanted)} measurements, {len(wanted) - len(missing)} of them finished before")
        if missing and not ready:
            about = {"session": session, "command": sys.argv, **machine.describe(), "dtype": str(bench.target.dtype)}
            with (store.folder / "sessions.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(about) + "\n")
        needed = {name for name, _, _ in missing} - {*ready}
        for name in filter(needed.__contains__, chosen):
            ready[name] = made[name]()
            short = {"max_new_tokens": min(WARM_UP_TOKENS, bench.options.max_new_tokens), "min_new_tokens": 0}
            measure_job(bench, ready[name], bench.warm_up, **short)
        for count, (name, job, repeat) in enumerate(missing, start=1):
            ready[name].start(repeat)
            measured = measure_job(bench, ready[name], job, repeat)
            store.append(Record(store.fingerprint, session, name, job.id, job.group, repeat, measured))
            speed = f"{measured.new_tokens / measured.seconds:.1f} tokens/s"
            log.print(f"{count}/{len(missing)}  {job.group} {job.id[:20]} #{repeat}  {name}: {speed}", markup=False)
        turn += 1
        answers = {r.job: r.measurement.tokens[0] for r in store.records if (r.method, r.repeat) == (PLAIN, 0)}
        due = bench.next_turns(answers, turn) if bench.options.all_turns else []


def _report(bench: Bench, records: Sequence[Record], identities: dict[str, Identity], out: Path) -> None:
    order = list(catalogue(bench))
    measured = list(dict.fromkeys(record.method for record in records))
    names = [name for name in order if name in measured] + [name for name in measured if name not in order]
    rows = summarise(records, names)
    best = best_of_transformers(rows)
    options, about = bench.options, machine.describe() | {"dtype": str(bench.target.dtype)}
    jobs, repeats = {record.job for record in records}, 1 + max(record.repeat for record in records)
    known = [json.loads(line) for line in (out / "sessions.jsonl").read_text().splitlines()]
    sessions = [session for session in known if session["session"] in {record.session for record in records}]
    took = f"{len(sessions)} session{'s' if len(sessions) > 1 else ''}"
    if len({session["specdec_source"] for session in sessions}) > 1:
        took += ", between which specdec's code changed"
    same = ", ".join(f"{name} {n} of {of}" for name, (n, of) in same_with_the_seed(records).items())
    seeds = f"Texts that are plain decoding's with the same seed: {same or 'none compared'}."
    differences = [difference for identity in identities.values() for difference in identity.differences]
    text = "\n\n".join(
        [
            f"# {Path(options.target).name}"
            + (f" with {Path(options.draft).name}" if options.draft else "")
            + f": T = {options.temperature:g}, batch {options.batch_size}, {options.max_new_tokens} new tokens"
            + (", end tokens ignored" if options.full_length else ""),
            f"{about['cpu']}, {about['usable_cores']} cores, {about['threads']} threads, {about['dtype']}; torch "
            f"{about['torch']}, transformers {about['transformers']}, specdec {about['specdec']}. "
            f"{len(jobs)} {'prompts' if options.batch_size == 1 else 'batches'}, medians of {repeats} repeats, {took}.",
            "Speed-up over plain `generate()`, prefill included (ratio of the mean tokens/s per question):",
            speed_table(rows, best),
            best_lines(rows, best),
            "Where it comes from (specdec's rates pooled over all rounds; shares are of the rounds' time):",
            detail_table(rows, identities),
            *([seeds] if options.temperature else []),
            *(["Texts that differ from plain decoding's:", _difference_table(differences)] if differences else []),
        ]
    )
    content = {
        "command": sys.argv,
        "machine": about,
        "settings": options.fingerprinted,
        "sessions": sessions,
        "methods": [
            {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "report"}
            | {"report": row.report.to_dict() if row.report else None}
            for row in rows
        ],
        "best_of_transformers": dataclasses.asdict(best) if best else None,
        "identity": {name: dataclasses.asdict(identity) for name, identity in identities.items()},
        "records": [json.loads(record.to_json()) for record in records],
    }
    _write(out, "results", content, text)


def _difference_table(differences: Sequence[Difference]) -> str:
    lines = [
        [
            d.method,
            d.job[:24] + (f", row {d.row}" if d.row else ""),
            str(d.repeat),
            str(d.divergence.index),
            f"{d.divergence.gap:.4f}",
            f"{d.divergence.top:.1f}",
            "yes" if d.near_tie else "NO",
        ]
        for d in differences
    ]
    return table(["method", "question", "repeat", "position", "gap of the two best logits", "best", "near tie"], lines)


def _pass_costs(bench: Bench) -> tuple[dict[str, Any], str]:
    models = {"target": target_runner(bench.target)}
    if bench.options.draft is not None:
        models["draft"] = target_runner(bench.draft)
        models["draft, as specdec runs it"] = DraftModelProposer(bench.draft).new_runner()
    costs = {name: pass_costs(runner, batch_size=bench.options.batch_size) for name, runner in models.items()}
    base = costs["target"][1]
    lines = []
    for name, cost in costs.items():
        relative = [f"{seconds / cost[1]:.2f}" for seconds in cost.values()]
        lines.append([name, f"{1e3 * cost[1]:.1f}", f"{cost[1] / base:.2f}", *relative])
    head = ["tokens", "ms for 1", "of the target's", *map(str, costs["target"])]
    content = {"machine": machine.describe() | {"dtype": str(bench.target.dtype)}, "seconds": costs}
    title = f"A pass over n tokens per row, 300 in the cache, batch {bench.options.batch_size}, against one token:"
    return content, f"{title}\n\n{table(head, lines)}"


def _memory(options: Options, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    figures = {name: peak_memory(options, name) for name in names}
    base = figures[PLAIN]["peak"]
    lines = [
        [name, *(number(figure[part]) for part in ("loaded", "generating", "peak")), times(figure["peak"] / base)]
        for name, figure in figures.items()
    ]
    head = ["method", "MiB after loading", "more while generating", "peak", "of plain's"]
    return {"machine": machine.describe(), "mib": figures}, table(head, lines)


def _write(out: Path, name: str, content: dict[str, Any], text: str) -> None:
    """Write `content` as JSON and `text` as Markdown to the folder, and print the text."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(_finite(content), indent=1) + "\n")
    (out / f"{name}.md").write_text(text + "\n")
    print(text)


def _finite(value: Any) -> Any:
    """Replace NaN by None, since JSON has no NaN."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value != value else value


if __name__ == "__main__":
    app()
