"""`specdec generate`: generates a text and reports how."""

from __future__ import annotations

import sys

import typer

from specdec.cli import options
from specdec.cli.common import check, generator, interrupted, print_message, sampling
from specdec.data.entries import check_text
from specdec.utils.choices import COUPLED


def generate(
    target: options.Target,
    prompt: str | None = typer.Argument(
        None, help="User message, in the chat template if the model has one. Default: read from standard input."
    ),
    proposer: options.Proposer = "auto",
    max_new_tokens: int = typer.Option(256, min=1, help="Maximum new tokens."),
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    draft_length: options.DraftLength = None,
    rule: options.Rule = COUPLED,
    dtype: options.Format = "auto",
    device: options.Device = None,
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    compare: bool = typer.Option(False, "--compare", help="Run plain decoding first, and print the speed-up."),
) -> None:
    """Stream a text to standard output, then print a report to standard error.

    Ctrl-C stops the text and prints the report so far.
    """
    check(target, proposer)
    text = _read(prompt)
    from specdec.cli.plain_streamer import PlainStreamer
    from specdec.data.prompts import Prompt

    spec, tokenizer = generator(target, proposer, draft_length, rule, dtype, device)
    inputs = Prompt("", text).encode(tokenizer, spec.model.device)
    plain_seconds = 0.0
    if compare:
        from specdec.evaluation.methods import plain
        from specdec.evaluation.timing import Speed, time_call

        call = time_call(plain(spec.model), inputs, max_new_tokens=max_new_tokens, **sampling(temperature, seed))
        plain_seconds = Speed.of([call]).time_per_token
    streamer = PlainStreamer(tokenizer)
    stopped = False
    try:
        spec.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling(temperature, seed))
    except KeyboardInterrupt:
        stopped = True
        streamer.end()
    report = spec.last_report
    print_message(report.to_json() if as_json else f"\n{report}")
    if not streamer.has_text and not stopped:
        tokens = f"{report.num_output_tokens} new tokens"
        print_message(f"the answer has no text: its {tokens} are special ones or decode to nothing", "warning")
    if plain_seconds and report.num_output_tokens:
        from specdec.evaluation.verdict import compared_once

        print_message(compared_once(plain_seconds, report))
    if stopped:
        raise interrupted()


def _read(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise ValueError('a prompt is missing: use specdec generate MODEL "a prompt", or pass one on standard input')
    try:
        text = sys.stdin.read() if prompt is None else prompt
        check_text(text)
    except ValueError as error:
        raise ValueError(f"the prompt is not text in UTF-8: {error}") from error
    if not text.strip():
        raise ValueError("the prompt is empty: give some text")
    return text
