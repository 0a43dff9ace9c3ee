"""`specdec generate`: a text, and what it took."""

from __future__ import annotations

import sys
from time import perf_counter

import typer

from specdec.cli.common import (
    DEVICE,
    DRAFT_LENGTH,
    NUMBER_FORMAT,
    SEED,
    WHAT_DRAFTS,
    bad_input_ends,
    generator,
    sampling,
)
from specdec.proposers.named import check_name


def generate(
    target: str = typer.Argument(help="Path or hub id of the target model."),
    prompt: str | None = typer.Argument(
        None, help="What to say to it, in its chat template if it has one; read from standard input if left out."
    ),
    proposer: str = typer.Option("auto", help=WHAT_DRAFTS),
    max_new_tokens: int = typer.Option(256, min=1, help="Tokens to write at most."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 is greedy."),
    seed: int | None = typer.Option(None, help=SEED),
    draft_length: int | None = typer.Option(None, min=0, help=DRAFT_LENGTH),
    dtype: str = typer.Option("auto", help=NUMBER_FORMAT),
    device: str | None = typer.Option(None, help=DEVICE),
    as_json: bool = typer.Option(False, "--json", help="The report as JSON."),
    compare: bool = typer.Option(False, "--compare", help="Plain decoding first, and how much faster this was."),
) -> None:
    """Write a text to standard output as it comes, then the report to standard error.

    Ctrl-C ends the text; the report of what was written is printed all the same.
    """
    from transformers import TextStreamer

    from specdec.data.prompts import Prompt

    with bad_input_ends():
        check_name(proposer)
        asked = _asked(prompt)
        spec, tokenizer = generator(target, proposer, draft_length, dtype, device)
    inputs = Prompt("", asked).encode(tokenizer, spec.model.device)
    plain = 0.0
    if compare:
        start = perf_counter()
        out = spec.model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling(temperature, seed))
        plain = (perf_counter() - start) / (out.shape[1] - inputs["input_ids"].shape[1])
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        spec.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling(temperature, seed))
    except KeyboardInterrupt:
        streamer.end()
        typer.echo("stopped", err=True)
    report = spec.last_report
    typer.echo(report.to_json() if as_json else f"\n{report}", err=True)
    if plain and report.num_output_tokens:
        typer.echo(f"{plain * report.tokens_per_second:.2f}x plain decoding, {1 / plain:.1f} tokens/s", err=True)


def _asked(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise ValueError('a prompt is missing: specdec generate MODEL "a prompt", or one on standard input')
    asked = sys.stdin.read() if prompt is None else prompt
    if not asked.strip():
        raise ValueError("the prompt is empty")
    return asked
