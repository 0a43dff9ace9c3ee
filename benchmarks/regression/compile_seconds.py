"""Measure the seconds that compiling the layers of a model takes, and the passes with and without.

    python -m benchmarks.regression.compile_seconds --target PATH

Each row is a process of its own: the first with an empty cache of compiled code, the later one with the cache that it
left. The time of the first compiled pass includes the compilation. Later passes are the median of 20.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated

import torch
import typer

from benchmarks.harness import machine
from benchmarks.harness.script import Dtype, bad_input_ends, load, prepare
from benchmarks.harness.table import number, table
from specdec.models.capability import capability
from specdec.models.runner import ModelRunner
from specdec.models.static_forward import StaticForward
from specdec.sampling.draft_tree import DraftTree

PROMPT, PASSES = 16, 20
app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the model.")],
    nodes: Annotated[int, typer.Option(min=2, help="Nodes of a draft.")] = 8,
    dtype: Dtype = "bfloat16",
    device: Annotated[str, typer.Option()] = "cpu",
    here: Annotated[bool, typer.Option(help="Measure in this process, and print the figures alone.")] = False,
) -> None:
    with bad_input_ends():
        prepare()
        if here:
            print(*measured(target, nodes, dtype, device), sep="\t")
            return
        rows = []
        options = ["--target", target, "--nodes", str(nodes), "--dtype", dtype, "--device", device]
        with TemporaryDirectory() as cache:
            for process in ("first", "later"):
                run = [sys.executable, "-m", __spec__.name, *options, "--here"]
                environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
                done = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                figures = done.stdout.splitlines()[-1].split("\t")
                rows.append([process, *(number(float(figure)) for figure in figures)])
        name = machine.cpu_model() if device == "cpu" else torch.cuda.get_device_name()
        print(f"{name}, {Path(target).name}, {dtype}\n")
        heading = ["process", "first compiled pass, s", "later passes, ms", "without, ms"]
        print(table(heading, rows))


@torch.no_grad()
def measured(target: str, nodes: int, dtype: str, device: str) -> tuple[float, float, float]:
    """Seconds of the first compiled pass, milliseconds of later ones and of passes that are not compiled."""
    model = load(target, dtype, device)
    forward = StaticForward(model)
    runner = ModelRunner(model, capability(model).masks, static_forward=forward)
    runner.start(1)
    runner.extend(torch.arange(1, 1 + PROMPT, device=device)[None], [0])
    draft = DraftTree.from_chain(torch.ones(1, dtype=torch.long), torch.arange(2, 1 + nodes)[None]).on(
        torch.device(device)
    )
    run = partial(runner.grow, draft.tokens, draft.depth, None, chain=True)
    _seconds(run, runner, 1)  # a size is compiled at its second use
    compiled = _seconds(run, runner, 1)
    if forward.refused or not len(forward):
        raise ValueError(f"the passes of {target} were not compiled: {forward.refused}")
    later = [_seconds(run, runner, 1) for _ in range(PASSES)]
    forward.refused = "measured without"
    eager = [_seconds(run, runner, 1) for _ in range(PASSES)]
    return compiled, 1000 * median(later), 1000 * median(eager)


def _seconds(run: partial, runner: ModelRunner, rows: int) -> float:
    start = perf_counter()
    output = run()
    float(output.logits[0, 0, 0])  # waits for a device
    taken = perf_counter() - start
    runner.commit([0] * rows)
    return taken


if __name__ == "__main__":
    app()
