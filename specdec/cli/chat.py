"""`specdec chat`: a conversation in the terminal, with accepted draft tokens in colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

from specdec.cli.common import (
    Device,
    DraftLength,
    Format,
    ProposerOption,
    Rule,
    Seed,
    Temperature,
    check,
    generator,
    interrupted,
    sampling,
)
from specdec.utils.choices import COUPLED
from specdec.utils.paths import located

if TYPE_CHECKING:
    from specdec.engine.report import Report


def chat(
    target: str = typer.Argument(help="Path or hub id of a chat model.", callback=located),
    proposer: ProposerOption = "auto",
    system: str | None = typer.Option(None, help="System prompt."),
    max_new_tokens: int = typer.Option(512, min=1, help="Maximum new tokens per answer."),
    temperature: Temperature = 0.0,
    seed: Seed = None,
    draft_length: DraftLength = None,
    rule: Rule = COUPLED,
    dtype: Format = "auto",
    device: Device = None,
) -> None:
    """Chat with a model. Ctrl-C stops its answer and keeps the conversation; Ctrl-D ends the conversation."""
    console = Console(highlight=False)
    check(target, proposer)
    from specdec.cli.chat_session import Chat
    from specdec.cli.streamer import ACCEPTED_STYLE, ColourStreamer

    spec, tokenizer = generator(target, proposer, draft_length, rule, dtype, device)
    chat_session = Chat(spec, tokenizer, system, max_new_tokens=max_new_tokens, **sampling(temperature, seed))
    console.print(f"Accepted draft tokens are [{ACCEPTED_STYLE}]coloured[/].")
    console.print("[dim]Ctrl-C stops an answer, Ctrl-D ends the conversation.[/dim]")
    stopped = False
    try:
        while (said := _asked(console)) is not None:
            if not said:
                continue
            try:
                report = chat_session.say(said, ColourStreamer(tokenizer, console))
            except KeyboardInterrupt:
                console.print("\n[dim](stopped; the conversation continues)[/dim]")
                continue
            except ValueError as error:  # only this turn fails, the conversation continues
                typer.secho(f"error: {error}", fg="red", err=True)
                continue
            console.print(f"[dim]{_in_a_line(report)}[/dim]")
    except KeyboardInterrupt:  # while waiting for input
        stopped = True
        console.print()
    if spec.report.num_calls:
        console.print(f"\n{spec.report}", markup=False)
    if stopped:
        raise interrupted()


def _in_a_line(report: Report) -> str:
    return (
        f"{report.num_output_tokens} tokens in {report.total_seconds:.1f} s, {report.tokens_per_second:.1f} tokens/s; "
        f"{report.tokens_per_round:.2f} per pass of the model"
    )


def _asked(console: Console) -> str | None:
    """Read a line from the user; None at the end of input."""
    try:
        return console.input("[bold]> [/bold]").strip()
    except UnicodeDecodeError as error:
        typer.secho(f"error: the terminal sent bytes that are not text: {error}", fg="red", err=True)
        return ""
    except EOFError:
        console.print()
        return None
