"""Compare the two forms of exactness in half precision: `exact=True`, and the kernels of `with spec.exact():`.

    python -m benchmarks.regression.same_text --target PATH --proposer auto --prompts questions.jsonl --dtype bfloat16

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
app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    prompts: Annotated[Path, typer.Option(help="File of questions (JSONL).", exists=True, dir_okay=False)],
    proposer: Annotated[str, typer.Option(help="Proposer, in the format of SpeculativeGenerator.")] = "auto",
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
    methods = methods_of(SpeculativeGenerator(bench.target, proposer))
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
            right = texts[PLAIN_WITHIN if "within" in name else PLAIN]
            same[name] += bool(number_of) and torch.equal(text, right)
    rates = {name: tokens[name] / seconds[name] for name in methods}
    rows = [
        [name, number(rate), times(rate / rates[PLAIN]), f"{same[name]:.0f} of {len(bench.jobs)}"]
        for name, rate in rates.items()
    ]
    print(f"{conditions(bench.target, max_new_tokens)}, temperature {temperature:g}, {len(bench.jobs)} questions\n")
    print(table(["method", "tokens/s", "speed-up", "plain's text"], rows))


def methods_of(spec: SpeculativeGenerator) -> dict[str, Callable[..., Tensor]]:
    """Functions by name that take `generate()`'s arguments."""

    def within(generate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            with spec.exact():
                return generate(*args, **kwargs)

        return run

    return {
        PLAIN: spec.model.generate,
        "specdec": spec.generate,
        "specdec, exact=True": spec.options(exact=True).generate,
        PLAIN_WITHIN: within(spec.model.generate),
        "specdec, within the context": within(spec.generate),
    }


if __name__ == "__main__":
    app()
