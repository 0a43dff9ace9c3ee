"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from specdec.utils.choices import PROPOSERS_IN_WORDS, NumberFormat, ProposerName, RuleName
from specdec.utils.paths import located

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4  # temperatures: decoding is greedy below and uniform above


def proposer_names(incomplete: str) -> list[str]:
    """Complete a proposer's name in the shell."""
    names = (*get_args(ProposerName), "draft:", "dflash:", "ngram+draft:")
    return [name for name in names if name.startswith(incomplete)]


def check_temperature(temperature: float) -> float:
    """Reject a temperature so low that dividing the logits by it gives infinity."""
    if 0 < temperature < MIN_TEMPERATURE:
        raise typer.BadParameter(f"{temperature} is neither 0, which means greedy, nor at least {MIN_TEMPERATURE}")
    return temperature


PROPOSER_HELP = f"Proposer: {PROPOSERS_IN_WORDS}."
Target = Annotated[str, typer.Argument(help="Path or hub id of the target model.", callback=located)]
Proposer = Annotated[str, typer.Option(help=PROPOSER_HELP, autocompletion=proposer_names)]
Temperature = Annotated[
    float,
    typer.Option(min=0.0, max=MAX_TEMPERATURE, help="Sampling temperature; 0 is greedy.", callback=check_temperature),
]
Seed = Annotated[
    int | None,
    typer.Option(min=-(2**63), max=2**64 - 1, help="Random seed for sampling."),
]
DraftLength = Annotated[
    int | None, typer.Option(min=0, help="Draft tokens per round; 0: none. Default: adapts to measured costs.")
]
Rule = Annotated[RuleName, typer.Option(help='Verification rule above temperature 0; "typical" is lossy.')]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="Compute drafted tokens bit for bit as plain decoding, for the same text in half precision."
    ),
]
Format = Annotated[NumberFormat, typer.Option(help="Number format; auto: the fastest on this device.")]
Device = Annotated[str | None, typer.Option(help='Device: "cpu", "cuda", ... Default: the best one available.')]
Repeats = Annotated[
    int,
    typer.Option("--repeat", "--repeats", min=1, help="Turns, in each of which every method answers every prompt."),
]
Limit = Annotated[int, typer.Option(min=1, help="Maximum number of prompts.")]


def prompts_option(default: str) -> Any:
    """Option of a file of prompts. default: number of built-in prompts that are used without it."""
    text = "Prompts: .txt with one per line, or a format of `regenerate`. Default: {} built-in prompts."
    return typer.Option(None, help=text.format(default), exists=True)
