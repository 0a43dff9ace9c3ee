"""`specdec bench`: plain decoding and proposers on your prompts."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import typer

from specdec.cli.common import (
    WHAT_DRAFTS,
    Device,
    DraftLength,
    Format,
    Rule,
    Target,
    Temperature,
    check,
    interrupted,
    load,
    proposer_names,
    sampling,
)
from specdec.cli.measuring import bar, encoded, of_ours, on_prompts
from specdec.data.messages import first_questions
from specdec.utils.choices import COUPLED

PICTURES = (".png", ".svg", ".pdf")


def bench(
    target: Target,
    proposers: list[str] | None = typer.Argument(
        None, help=f'{WHAT_DRAFTS} Several may be given; "auto" by default.', autocompletion=proposer_names
    ),
    prompts: Path | None = typer.Option(
        None, help="Your prompts: .txt, one a line, or as for `regenerate`; three of ours by default.", exists=True
    ),
    limit: int = typer.Option(8, min=1, help="Use the first so many prompts."),
    repeats: int = typer.Option(1, min=1, help="Times that each prompt is answered in each way."),
    max_new_tokens: int = typer.Option(128, min=8, help="Tokens to write for each."),
    temperature: Temperature = 0.0,
    draft_length: DraftLength = None,
    rule: Rule = COUPLED,
    dtype: Format = "auto",
    device: Device = None,
    as_json: bool = typer.Option(False, "--json", help="What was measured as JSON, in place of the table."),
    chart: Path | None = typer.Option(None, help="Picture of the speed-ups to write: .png, .svg or .pdf."),
) -> None:
    """Answer prompts plainly and with each proposer, taking turns: the speed-ups, on standard output.

    Above temperature 0 every call begins with the same seed. Ctrl-C ends it; what was measured until then is printed
    all the same.
    """
    names = list(dict.fromkeys(proposers or ["auto"]))
    for name in names:
        check(target, name)
    if chart is not None:
        _check(chart)
    asked, count = first_questions(prompts, limit) if prompts else ([], 0)
    from specdec.evaluation.bench import bench as measure
    from specdec.proposers.factory import as_proposers

    try:
        model, tokenizer = load(target, dtype=dtype, device=device)
        made = as_proposers(names, model)
        used = encoded(asked, tokenizer) or of_ours(tokenizer, limit)
        with bar() as progress:
            found = measure(
                model,
                made,
                used,
                repeats=repeats,
                max_new_tokens=max_new_tokens,
                draft_length=draft_length,
                rule=rule,
                progress=progress,
                **sampling(temperature),
            )
    except KeyboardInterrupt:
        raise interrupted("stopped before anything was measured") from None
    if as_json:
        typer.echo(json.dumps(found.to_dict() | {"target": target, "max_new_tokens": max_new_tokens}))
    else:
        asked_of = on_prompts(found.prompts, count or len(used), prompts)
        times = f", {repeats} times" if repeats > 1 else ""
        typer.echo(f"measured on {asked_of}{times}, up to {max_new_tokens} new tokens each, in whole calls\n")
        typer.echo(found.summary())
    if chart is not None:
        from specdec.evaluation.plots import speed_ups

        speed_ups(found.speed_ups).figure.savefig(chart)
        typer.echo(f"the chart is in {chart}", err=True)
    if found.stopped:
        raise interrupted()


def _check(chart: Path) -> None:
    if chart.suffix not in PICTURES:
        raise ValueError(f"{chart} must end in one of {', '.join(PICTURES)}")
    if not chart.parent.is_dir():
        raise ValueError(f"there is no folder {chart.parent} to write {chart.name} to")
    if chart.is_dir() or not os.access(chart if chart.exists() else chart.parent, os.W_OK):
        raise ValueError(f"{chart} cannot be written: choose another file")
    if find_spec("matplotlib") is None:
        raise ValueError("a chart is drawn with matplotlib, which is not there: pip install matplotlib")
