"""Compare the two forms of exactness in half precision: `exact=True`, and the kernels of `with spec.exact():`.

    python -m benchmarks.regression.same_text --target PATH --proposers auto --prompts questions.jsonl --out results

Methods take turns on every question. Texts within the context are compared with plain decoding's within it, the others
with plain decoding's outside. Times are whole calls; every method answers the first question once more before, as a
warm-up. Measurements are kept in --out: run the same command again to resume, or add proposers, forms or questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from benchmarks.harness.measure import Measurement, Record, measure_job
from benchmarks.harness.options import Bench, Options
from benchmarks.harness.script import Dtype, MaxPromptTokens, Threads, bad_input_ends, conditions, log
from benchmarks.harness.store import Store
from benchmarks.harness.table import number, table, times
from specdec import SpeculativeGenerator
from specdec.evaluation.methods import PLAIN, Method, TurnMemories, plain

SUFFIX = ", within the context"
USUAL, EXACT, WITHIN = "usual", "exact", "context"
app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    prompts: Annotated[Path, typer.Option(help="File of questions (JSONL).", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for results. An earlier run in it is resumed.")],
    proposers: Annotated[
        str, typer.Option(help="In the format of SpeculativeGenerator, separated by commas.")
    ] = "auto",
    forms: Annotated[str, typer.Option(help="Calls to compare, from: usual,exact,context.")] = "usual,exact,context",
    per_category: Annotated[int, typer.Option(min=1, help="Questions per group.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    max_prompt_tokens: MaxPromptTokens = None,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
) -> None:
    options = Options(
        target,
        prompts,
        per_category=per_category,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype,
        threads=threads,
    )
    bench = Bench(options)
    with bad_input_ends():
        store = Store(out, options.fingerprinted)
        methods = [plain(bench.target)]
        for each in proposers.split(","):
            for method in methods_of(each, SpeculativeGenerator(bench.target, each), forms.split(",")):
                if method.name not in {known.name for known in methods}:
                    methods.append(method)
    warm = set()
    for count, job in enumerate(bench.jobs, start=1):
        for method in methods:
            if (method.name, job.id, 0) in store.done:
                continue
            if method.name not in warm:
                method.start(turn=-1)
                measure_job(bench, method, bench.jobs[0])
                warm.add(method.name)
            method.start(turn=0)
            taken = measure_job(bench, method, job)
            store.append(Record(store.fingerprint, "", method.name, job.id, job.group, 0, taken))
            rate = taken.new_tokens / taken.seconds
            log.print(f"{count}/{len(bench.jobs)}  {method.name}: {rate:.2f} tokens/s", markup=False)
    found = {(record.method, record.job): record.measurement for record in store.records}
    print(f"{conditions(bench.target, max_new_tokens)}, temperature {temperature:g}, {len(bench.jobs)} questions\n")
    lines = rows([method.name for method in methods], [job.id for job in bench.jobs], found)
    print(table(["method", "tokens/s", "speed-up", "plain's text"], lines))


def methods_of(proposer: str, spec: SpeculativeGenerator, forms: Sequence[str]) -> list[Method]:
    """Methods of a proposer; the form within the context comes with plain decoding's there.

    Raises:
        ValueError: there is no such form.
    """

    def within(generate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            with spec.exact():
                return generate(*args, **kwargs)

        return run

    def drafting(name: str, generate: Callable[..., Tensor]) -> Method:
        return Method(name, generate, memories=TurnMemories.of(spec.proposer))

    methods = {
        USUAL: [drafting(proposer, spec.generate)],
        EXACT: [drafting(f"{proposer}, exact=True", spec.options(exact=True).generate)],
        WITHIN: [
            Method(PLAIN + SUFFIX, within(spec.model.generate)),
            drafting(proposer + SUFFIX, within(spec.generate)),
        ],
    }
    if unknown := [form for form in forms if form not in methods]:
        raise ValueError(f"--forms {','.join(unknown)}: choose from {','.join(methods)}")
    return [method for form in forms for method in methods[form]]


def rows(names: Sequence[str], jobs: Sequence[str], found: dict[tuple[str, str], Measurement]) -> list[list[str]]:
    """Make the table's rows: tokens/s over all jobs, the speed-up, and how many texts are plain decoding's."""

    def rate(name: str) -> float:
        return sum(found[name, job].new_tokens for job in jobs) / sum(found[name, job].seconds for job in jobs)

    lines = []
    for name in names:
        reference = PLAIN + SUFFIX if name.endswith(SUFFIX) else PLAIN
        same = sum(found[name, job].tokens == found[reference, job].tokens for job in jobs)
        lines.append([name, number(rate(name)), times(rate(name) / rate(PLAIN)), f"{same} of {len(jobs)}"])
    return lines


if __name__ == "__main__":
    app()
