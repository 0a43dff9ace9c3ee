"""`specdec generate`: generates a text and reports how."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from specdec.cli import options
from specdec.cli.common import check, generator, interrupted, print_message, sampling
from specdec.cli.progress import progress_bar
from specdec.data.entries import check_text
from specdec.utils.choices import COUPLED

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.engine.generator import SpeculativeGenerator
    from specdec.evaluation.timing import Call


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
    exact: options.Exact = False,
    dtype: options.Format = "auto",
    device: options.Device = None,
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    details: bool = typer.Option(False, "--details", help="Print all rates and times in the report."),
    compare: bool = typer.Option(
        False, "--compare", help="Run plain decoding first, and print the speed-up and whether the text is the same."
    ),
) -> None:
    """Stream a text to standard output, then print a report to standard error.

    Ctrl-C stops the text and prints the report so far.
    """
    check(target, proposer)
    text = _read(prompt)
    from specdec.cli.plain_streamer import PlainStreamer
    from specdec.data.prompts import Prompt
    from specdec.engine.report import SPEED_UP, aligned
    from specdec.evaluation.methods import described
    from specdec.models.text_limits import check_prompt

    spec, tokenizer = generator(target, proposer, draft_length, rule, exact, dtype, device)
    print_message(f"drafts come from {described(spec.proposer)}")
    inputs = Prompt("", text).encode(tokenizer, spec.model.device)
    try:
        check_prompt(spec.model, inputs["input_ids"][0].tolist(), max_new_tokens)
    except ValueError as error:
        raise ValueError(f"the prompt cannot be answered: {error}") from error
    plain_call = _plain_call(spec, inputs, max_new_tokens, temperature, seed) if compare else None
    streamer = PlainStreamer(tokenizer)
    output, stopped = None, False
    try:
        output = spec.generate(
            **inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling(temperature, seed)
        )
    except KeyboardInterrupt:
        stopped = True
        streamer.end()
    report = spec.last_report
    compared = []
    if plain_call is not None and report.num_output_tokens:
        from specdec.evaluation.verdict import compared_once, compared_texts

        compared.append((SPEED_UP, compared_once(plain_call, report)))
        if output is not None and rule == COUPLED and (temperature == 0 or seed is not None):
            tokens = output[0, -report.num_output_tokens :].tolist()
            compared.append(("same text", compared_texts(plain_call.texts[0], tokens, spec.model.dtype)))
    if as_json:
        print_message(report.to_json())
        for _, line in compared:
            print_message(line)
    else:
        rows = report.table() if details else report.summary()
        print_message("\n" + aligned([*compared, *(row for row in rows if not compared or row[0] != SPEED_UP)]))
    if not streamer.has_text and not stopped:
        new_tokens = f"{report.num_output_tokens} new tokens"
        print_message(f"the answer has no text: its {new_tokens} are special ones or decode to nothing", "warning")
    if stopped:
        raise interrupted()


def _plain_call(
    spec: SpeculativeGenerator, inputs: dict[str, Tensor], max_new_tokens: int, temperature: float, seed: int | None
) -> Call:
    """Time the same call of plain decoding. What happens once per process is done before, and not timed."""
    from specdec.evaluation.methods import plain
    from specdec.evaluation.timing import Clock, time_call

    class Progress(Clock):
        def show(self, tokens: Tensor) -> None:
            progress(len(self.times), max_new_tokens)

    print_message("first the same by plain decoding, to compare with (not shown)")
    _ = spec.capability  # found by running the model
    spec.model.generate(**inputs, max_new_tokens=2, **sampling(0.0))
    with progress_bar("plain decoding") as progress:
        given = sampling(temperature, seed)
        return time_call(plain(spec.model), inputs, Progress(), max_new_tokens=max_new_tokens, **given)


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
