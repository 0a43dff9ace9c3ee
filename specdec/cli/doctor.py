"""`specdec doctor`: what is fastest here, and why not more."""

from __future__ import annotations

from pathlib import Path

import typer

from specdec.cli.common import NUMBER_FORMAT, WHAT_DRAFTS, bad_input_ends, drafting, load, sampling
from specdec.proposers.named import check_name


def doctor(
    target: str = typer.Argument(help="Path or hub id of the target model."),
    proposer: str = typer.Argument(help=WHAT_DRAFTS),
    prompts: Path | None = typer.Option(
        None, help="Your prompts: .txt, one a line, or as for `regenerate`; two of ours by default.", exists=True
    ),
    limit: int = typer.Option(8, min=1, help="Use the first so many prompts."),
    max_new_tokens: int = typer.Option(64, min=8, help="Tokens to write for each."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 is greedy."),
    dtype: str = typer.Option("auto", help=NUMBER_FORMAT),
) -> None:
    """Measure plain decoding and every way to draft, in turns: which is fastest on these prompts, what limits it."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from specdec.data.conversations import encode_prompt
    from specdec.data.prompts import PROMPTS
    from specdec.doctor import diagnose, first_questions

    with bad_input_ends():
        check_name(proposer)
        asked, count = first_questions(prompts, limit) if prompts else ([], 0)
        model, tokenizer = load(target, dtype=dtype)
        theirs = [torch.tensor(encode_prompt(messages, tokenizer)) for messages in asked]
        ours = [prompt.encode(tokenizer)["input_ids"][0] for prompt in PROMPTS[:2]]
        columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            found = diagnose(
                model,
                drafting(proposer, model),
                theirs or ours,
                usual=ours if theirs else (),
                max_new_tokens=max_new_tokens,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                **sampling(temperature),
            )
    used = f"{len(theirs)} of {count:,}" if count > len(theirs) else f"{count:,}"
    of_whom = f"{used} prompts of {prompts}" if prompts else f"{len(ours)} prompts of ours"
    typer.echo(f"measured on {of_whom}, up to {max_new_tokens} new tokens each, in whole calls\n")
    typer.echo(found.in_words())
