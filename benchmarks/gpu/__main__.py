"""Measure specdec on a GPU: rounds and their kernels, against plain decoding in the same run.

    python -m benchmarks.gpu --out results                      # on a GPU: 7 minutes, without downloads
    python -m benchmarks.gpu --out results --parts round,draft  # only these
    python -m benchmarks.gpu --out results --small              # on any machine: tiny models, to test the script

Models have real shapes and random weights, and their texts are known. Acceptance is simulated, verification is real.
All parts run in one process, so that each model is built once. Every part has a time limit. Rows and tables are
written as they come, so that a run that is cut off leaves what it has measured.
"""

from __future__ import annotations

import faulthandler
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils import logging

from benchmarks.gpu import parts
from benchmarks.gpu.results import Results, tables
from benchmarks.gpu.run import chosen, run_parts
from benchmarks.gpu.setting import Setting
from benchmarks.harness import machine

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl, results.md and tables of kernels.")],
    only: Annotated[str, typer.Option("--parts", help="Names of parts, separated by commas; default: all.")] = "",
    small: Annotated[bool, typer.Option(help="Use tiny models and short texts, also on a CPU.")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time limit in minutes; parts beyond it are left out.")] = 7,
    new_tokens: Annotated[int | None, typer.Option(min=8, help="New tokens per measured call.")] = None,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not small:
        raise typer.BadParameter("there is no GPU here: --small runs anywhere")
    try:
        selected = chosen([name.strip() for name in only.split(",") if name.strip()], parts.PARTS)
        results = Results(out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    logging.set_verbosity_error()
    (out / "machine.json").write_text(json.dumps(machine.describe(), indent=1))
    setting = Setting(device, small, new_tokens or (64 if small else 96), out)
    run_parts(setting, results, selected, 60 * minutes, lambda line: print(line, flush=True))
    print(tables(results.rows))


if __name__ == "__main__":
    try:
        app()
    finally:  # threads of a part that hangs must not keep the process alive
        faulthandler.dump_traceback_later(30, exit=True)
