"""`specdec chat`: a conversation in the terminal, with accepted draft tokens in colour."""

from __future__ import annotations

import typer
from rich.console import Console

from specdec.cli import options
from specdec.cli.common import check, generator, interrupted, print_message, sampling
from specdec.utils.choices import COUPLED
from specdec.utils.paths import located


def chat(
    target: str = typer.Argument(help="Path or hub id of a chat model.", callback=located),
    proposer: options.Proposer = "auto",
    system: str | None = typer.Option(None, help="System prompt."),
    max_new_tokens: int = typer.Option(512, min=1, help="Maximum new tokens per answer."),
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    draft_length: options.DraftLength = None,
    rule: options.Rule = COUPLED,
    exact: options.Exact = False,
    dtype: options.Format = "auto",
    device: options.Device = None,
) -> None:
    """Chat with a model. Ctrl-C stops its answer and keeps the conversation; Ctrl-D ends the conversation."""
    console = Console(highlight=False)
    check(target, proposer)
    from jinja2 import TemplateError

    from specdec.cli.streamer import ColourStreamer, colour_note
    from specdec.engine.chat import Chat

    spec, tokenizer = generator(target, proposer, draft_length, rule, exact, dtype, device)
    chat_session = Chat(spec, tokenizer, system, max_new_tokens=max_new_tokens, **sampling(temperature, seed))
    if note := colour_note(console):
        console.print(note)
    console.print("[dim]Ctrl-C stops an answer, Ctrl-D ends the conversation.[/dim]")
    stopped = False
    try:
        while (text := _read(console)) is not None:
            if not text:
                continue
            try:
                chat_session.say(text, ColourStreamer(tokenizer, console))
            except KeyboardInterrupt:
                console.print("\n[dim](stopped; the conversation continues)[/dim]")
                continue
            except Exception as error:  # only this turn fails, the conversation continues
                known = isinstance(error, (ValueError, TemplateError))
                print_message(error if known else f"{type(error).__name__}: {error}", "error")
                continue
            report = spec.last_report
            passes = f"; {report.tokens_per_round:.2f} per pass of the model" if report.num_row_rounds else ""
            console.print(
                f"[dim]{report.num_output_tokens} tokens in {report.total_seconds:.1f} s, "
                f"{report.tokens_per_second:.1f} tokens/s{passes}[/dim]"
            )
    except KeyboardInterrupt:  # while waiting for input
        stopped = True
        console.print()
    if spec.report.num_calls:
        console.print(f"\n{spec.report}", markup=False)
    if stopped:
        raise interrupted()


def _read(console: Console) -> str | None:
    """Read a line from the user; None at the end of input."""
    try:
        return console.input("[bold]> [/bold]").strip()
    except UnicodeDecodeError as error:
        print_message(f"the terminal sent bytes that are not text: {error}", "error")
        return ""
    except EOFError:
        console.print()
        return None
