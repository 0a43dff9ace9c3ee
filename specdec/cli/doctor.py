"""`specdec doctor`: finds the fastest draft method on this machine and what limits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from specdec.cli import options
from specdec.cli.common import check, interrupted, load, print_versions, sampling
from specdec.cli.measuring import built_in, encoded, print_results
from specdec.cli.progress import progress_bar
from specdec.data.messages import first_questions


def doctor(
    target: options.Target,
    proposer: str = typer.Argument("auto", help=options.PROPOSER_HELP, autocompletion=options.proposer_names),
    prompts: Path | None = options.prompts_option("two"),
    limit: options.Limit = 8,
    repeats: options.Repeats = 3,
    max_new_tokens: int = typer.Option(64, min=8, help="Maximum new tokens per prompt."),
    temperature: options.Temperature = 0.0,
    dtype: options.Format = "auto",
) -> None:
    """Find the fastest way to decode these prompts, and what limits it.

    Measures plain decoding and every draft method in turns, and a known head of the target that is on this machine.
    Methods are judged by what was accepted, then by speed. The verdict is one of them or "too noisy to tell". Ctrl-C
    stops the measurement; the diagnosis then uses the results so far.
    """
    check(target, proposer)
    questions, count = first_questions(prompts, limit) if prompts else ([], 0)
    from specdec.evaluation.doctor import diagnose
    from specdec.models.capability import installation_fault

    print_versions(err=True)
    if fault := installation_fault():
        raise ValueError(fault)
    model, tokenizer = load(target, dtype=dtype)
    theirs = encoded(questions, tokenizer, model, max_new_tokens)
    try:
        ours = built_in(tokenizer, 2 if theirs else min(2, limit), model, max_new_tokens)
    except ValueError:  # too long for this model
        if not theirs:
            raise
        ours = []
    arguments: dict[str, Any] = {"usual": ours if theirs else (), "repeats": repeats, "max_new_tokens": max_new_tokens}
    with progress_bar("measuring") as progress:
        found = diagnose(model, proposer, theirs or ours, progress=progress, **arguments, **sampling(temperature))
    print_results(found, found.answered, count or len(ours), prompts, max_new_tokens)
    if found.stopped:
        raise interrupted()
