"""`specdec doctor`: finds the fastest draft method on this machine and what limits it."""

from __future__ import annotations

from pathlib import Path

import typer

from specdec.cli.common import (
    WHAT_DRAFTS,
    Format,
    Target,
    Temperature,
    check,
    interrupted,
    load,
    print_versions,
    proposer_names,
    sampling,
)
from specdec.cli.measuring import bar, encoded, of_ours, on_prompts
from specdec.data.messages import first_questions


def doctor(
    target: Target,
    proposer: str = typer.Argument("auto", help=WHAT_DRAFTS, autocompletion=proposer_names),
    prompts: Path | None = typer.Option(
        None,
        help="Prompts: .txt with one per line, or a format of `regenerate`. Default: two built-in prompts.",
        exists=True,
    ),
    limit: int = typer.Option(8, min=1, help="Maximum number of prompts."),
    max_new_tokens: int = typer.Option(64, min=8, help="Maximum new tokens per prompt."),
    temperature: Temperature = 0.0,
    dtype: Format = "auto",
) -> None:
    """Find the fastest way to decode these prompts, and what limits it.

    Measures plain decoding and every draft method in turns. Ctrl-C stops the measurement; the diagnosis then uses the
    results so far.
    """
    check(target, proposer)
    asked, count = first_questions(prompts, limit) if prompts else ([], 0)
    from specdec.evaluation.doctor import diagnose
    from specdec.models.capability import installation_fault

    print_versions(err=True)
    if installation_fault():
        raise ValueError(installation_fault())
    model, tokenizer = load(target, dtype=dtype)
    theirs, ours = encoded(asked, tokenizer), of_ours(tokenizer, 2)
    with bar() as progress:
        found = diagnose(
            model,
            proposer,
            theirs or ours,
            usual=ours if theirs else (),
            max_new_tokens=max_new_tokens,
            progress=progress,
            **sampling(temperature),
        )
    asked_of = on_prompts(found.answered, count or len(ours), prompts)
    typer.echo(f"measured on {asked_of}, up to {max_new_tokens} new tokens each, in whole calls\n")
    typer.echo(found.summary())
    if found.stopped:
        raise interrupted()
