"""Compare the two forms of exactness in half precision: `exact=True`, and the kernels of `with spec.exact():`.

    python -m benchmarks.regression.same_text --target PATH --proposers auto --prompts questions.jsonl --dtype bfloat16

Methods take turns on every question. Texts within the context are compared with plain decoding's within it, the others
with plain decoding's outside. Times are whole calls; the first question is answered once more before, as a warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.harness.options import Bench, Options
from benchmarks.harness.script import Dtype, MaxPromptTokens, Threads, conditions
from benchmarks.harness.table import number, table, times
from specdec import SpeculativeGenerator

PLAIN, PLAIN_WITHIN = "plain", "plain, within the context"
USUAL, EXACT, WITHIN = "usual", "exact", "context"
app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    prompts: Annotated[Path, typer.Option(help="File of questions (JSONL).", exists=True, dir_okay=False)],
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
    methods: dict[str, Callable[..., Tensor]] = {PLAIN: bench.target.generate}
    for each in proposers.split(","):
        methods |= methods_of(each, SpeculativeGenerator(bench.target, each), forms.split(","))
    seconds, tokens, same = (dict.fromkeys(methods, 0.0) for _ in range(3))
    for number_of, job in enumerate([bench.jobs[0], *bench.jobs]):
        texts = {}
        for name, generate in methods.items():
            torch.manual_seed(options.seed)
            start = perf_counter()
            texts[name] = generate(job.prompts[0][None], **options.generate_arguments)[0]
            if number_of:
                seconds[name] += perf_counter() - start
                tokens[name] += len(texts[name]) - len(job.prompts[0])
        for name, text in texts.items():
            right = texts[PLAIN_WITHIN if WITHIN in name else PLAIN]
            same[name] += bool(number_of) and torch.equal(text, right)
    rates = {name: tokens[name] / seconds[name] for name in methods}
    rows = [
        [name, number(rate), times(rate / rates[PLAIN]), f"{same[name]:.0f} of {len(bench.jobs)}"]
        for name, rate in rates.items()
    ]
    print(f"{conditions(bench.target, max_new_tokens)}, temperature {temperature:g}, {len(bench.jobs)} questions\n")
    print(table(["method", "tokens/s", "speed-up", "plain's text"], rows))


def methods_of(proposer: str, spec: SpeculativeGenerator, forms: list[str]) -> dict[str, Callable[..., Tensor]]:
    """Functions by name that take `generate()`'s arguments; those within the context with plain decoding's there."""

    def within(generate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            with spec.exact():
                return generate(*args, **kwargs)

        return run

    methods = {
        USUAL: {proposer: spec.generate},
        EXACT: {f"{proposer}, exact=True": spec.options(exact=True).generate},
        WITHIN: {PLAIN_WITHIN: within(spec.model.generate), f"{proposer}, within the context": within(spec.generate)},
    }
    return {name: method for form in forms for name, method in methods[form].items()}


if __name__ == "__main__":
    app()
