"""`specdec bench`: compares plain decoding and proposers on your prompts."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from specdec.cli import options
from specdec.cli.common import check, interrupted, load, print_message, sampling
from specdec.cli.measuring import built_in, encoded, print_results
from specdec.cli.progress import progress_bar
from specdec.data.messages import first_questions
from specdec.utils.choices import COUPLED

CHARTS = (".png", ".svg", ".pdf")


def bench(
    target: options.Target,
    proposers: list[str] | None = typer.Argument(
        None,
        help=f'{options.PROPOSER_HELP} May be given several times; default: "auto".',
        autocompletion=options.proposer_names,
    ),
    prompts: Path | None = options.prompts_option("three"),
    limit: options.Limit = 8,
    repeats: options.Repeats = 3,
    max_new_tokens: int = typer.Option(128, min=8, help="Maximum new tokens per prompt."),
    temperature: options.Temperature = 0.0,
    draft_length: options.DraftLength = None,
    rule: options.Rule = COUPLED,
    exact: options.Exact = False,
    dtype: options.Format = "auto",
    device: options.Device = None,
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON instead of a table."),
    chart: Path | None = typer.Option(None, help="Write a chart of the speed-ups to this .png, .svg or .pdf file."),
) -> None:
    """Measure the speed-up of each proposer over plain decoding on your prompts.

    Methods take turns on every prompt, so that every speed-up has an interval, and the verdict is one proposer or "too
    noisy to tell". Above temperature 0 every call uses the same seed. Ctrl-C stops the measurement and prints the
    results so far.
    """
    names = list(dict.fromkeys(proposers or ["auto"]))
    for name in names:
        check(target, name)
    if chart is not None:
        _check(chart)
    questions, count = first_questions(prompts, limit) if prompts else ([], 0)
    from specdec.evaluation.bench import bench as measure
    from specdec.proposers.factory import as_proposers

    try:
        model, tokenizer = load(target, dtype=dtype, device=device)
        used = encoded(questions, tokenizer, model, max_new_tokens) or built_in(tokenizer, limit, model, max_new_tokens)
        arguments: dict[str, Any] = {
            "repeats": repeats,
            "max_new_tokens": max_new_tokens,
            "draft_length": draft_length,
            "rule": rule,
            "exact": exact,
        }
        with progress_bar("measuring") as progress:
            found = measure(
                model, as_proposers(names, model), used, progress=progress, **arguments, **sampling(temperature)
            )
    except KeyboardInterrupt:
        raise interrupted("stopped before anything was measured") from None
    if as_json:
        typer.echo(json.dumps(found.to_dict() | {"target": target, "max_new_tokens": max_new_tokens}))
    else:
        print_results(found, found.prompts, count or len(used), prompts, max_new_tokens)
    if chart is not None:
        from specdec.evaluation.plots import speed_ups

        speed_ups(found.speed_up_of).figure.savefig(chart)
        print_message(f"wrote the chart to {chart}")
    if found.stopped:
        raise interrupted()


def _check(chart: Path) -> None:
    if chart.suffix not in CHARTS:
        raise ValueError(f"{chart} must end in one of {', '.join(CHARTS)}")
    if not chart.parent.is_dir():
        raise ValueError(f"the folder {chart.parent} for {chart.name} does not exist: create it, or choose another one")
    if chart.is_dir() or not os.access(chart if chart.exists() else chart.parent, os.W_OK):
        raise ValueError(f"{chart} cannot be written: choose another file")
    if find_spec("matplotlib") is None:
        raise ValueError("--chart needs matplotlib, which is not installed: pip install matplotlib")
