"""What the commands share: their options, loading what these name, and saying what is wrong with it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from specdec.utils.choices import PROPOSERS_IN_WORDS, WITH_NGRAMS, NumberFormat, ProposerName, RuleName, check_name
from specdec.utils.paths import located, require_folder_or_id

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specdec.engine.generator import SpeculativeGenerator

COLDEST, HOTTEST = 1e-4, 1e4  # temperatures: beyond them all is greedy, or uniform
INTERRUPTED = 130  # as shells count: 128 and SIGINT's number


def proposer_names(incomplete: str) -> list[str]:
    """For a shell that completes one."""
    return [
        name for name in (*get_args(ProposerName), "draft:", "dflash:", "ngram+draft:") if name.startswith(incomplete)
    ]


def warm_enough(temperature: float) -> float:
    """Refuse a temperature so low that logits divided by it are infinite."""
    if 0 < temperature < COLDEST:
        raise typer.BadParameter(f"{temperature} is neither 0, which is greedy, nor at least {COLDEST}")
    return temperature


WHAT_DRAFTS = f"What drafts: {PROPOSERS_IN_WORDS}."
Target = Annotated[str, typer.Argument(help="Path or hub id of the target model.", callback=located)]
ProposerOption = Annotated[str, typer.Option(help=WHAT_DRAFTS, autocompletion=proposer_names)]
Temperature = Annotated[float, typer.Option(min=0.0, max=HOTTEST, help="0 is greedy.", callback=warm_enough)]
Seed = Annotated[
    int | None,
    typer.Option(min=-(2**63), max=2**64 - 1, help="Of what is drawn: the same seed gives the same text."),
]
DraftLength = Annotated[
    int | None, typer.Option(min=0, help="Tokens to draft per round, 0: none; by measured costs if left out.")
]
Rule = Annotated[RuleName, typer.Option(help='How drafts are verified above temperature 0; "typical" is lossy.')]
Format = Annotated[NumberFormat, typer.Option(help="auto: what is fastest here, in place of bfloat16.")]
Device = Annotated[str | None, typer.Option(help='"cpu", "cuda", ...: the best there is if left out.')]

format_of_others = warnings.formatwarning


class Said(logging.Handler):
    """What the library does that takes long, a line each on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(record.getMessage(), err=True)


def speak() -> None:
    """From now on the library's messages and warnings are lines for people."""
    warnings.formatwarning = summary
    log = logging.getLogger("specdec")
    log.setLevel(logging.INFO)
    if not any(isinstance(handler, Said) for handler in log.handlers):
        log.addHandler(Said())


def print_versions(err: bool = False) -> None:
    """Print installed releases, with a warning if specdec does not work with them or was not tested with them.

    torch is imported only where a release was not tested.
    """
    from specdec import __version__
    from specdec.utils.releases import TESTED, advice, is_tested, summary

    typer.echo(f"specdec {__version__}, {summary()}", err=err)
    untested = [package for package in TESTED if not is_tested(package)]
    if not untested:
        return
    try:
        from specdec.models.capability import installation_fault

        fault = installation_fault()
    except ImportError as error:
        fault = f"specdec cannot be imported here ({error}). {' '.join(advice(package) for package in untested)}"
    for message in [fault] if fault else [advice(package) for package in untested]:
        typer.secho(f"warning: {message}", fg="yellow", err=True)


def interrupted(what: str = "stopped") -> typer.Exit:
    """To be raised after Ctrl-C, when all that is to be said was said."""
    typer.echo(what, err=True)
    return typer.Exit(INTERRUPTED)


def check(target: str, proposer: str = "auto") -> None:
    """Raise ValueError for what can be seen to be wrong before torch is imported."""
    check_name(proposer)
    kind, _, source = proposer.removeprefix(WITH_NGRAMS).partition(":")
    if kind == "exit":  # a number of layers
        source = ""
    for name in (target, *([source] if source else [])):
        require_folder_or_id(name)


def load(
    target: str, tokenizer: bool = True, dtype: NumberFormat | None = None, device: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer.

    Args:
        dtype: number format by its name, "auto" for what is fastest here, which is said; None: as saved.
        device: by its name; None: the best there is.
    """
    from transformers import AutoTokenizer

    from specdec.models.hardware import best_device, crowded, format_for
    from specdec.models.loading import load as loaded
    from specdec.utils.parsing import read_by_library

    place = _device(device) if device else best_device()
    if others := crowded(place):
        typer.echo(others, err=True)
    model = loaded(target).to(place)
    if dtype is not None:
        chosen, why = format_for(dtype, model.dtype, model.device, model.num_parameters())
        model = model.to(chosen)
        typer.echo(f"computing in {str(chosen).removeprefix('torch.')} on {model.device}: {why}", err=True)
    if not tokenizer:
        return model, None
    with read_by_library(f"the tokenizer of {target}"):
        return model, AutoTokenizer.from_pretrained(target)


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name} is no device of this machine: {str(error).partition(chr(10))[0]}") from error
    return device


def sampling(temperature: float, seed: int | None = None) -> dict[str, Any]:
    """Arguments of `generate()`. seed: torch's, set now."""
    import torch

    if seed is not None:
        torch.manual_seed(seed)
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}


def generator(
    target: str, proposer: str, draft_length: int | None, rule: RuleName, dtype: NumberFormat, device: str | None
) -> tuple[SpeculativeGenerator, Any]:
    """A generator of what the options name, and the tokenizer."""
    from specdec.engine.generator import SpeculativeGenerator

    model, tokenizer = load(target, dtype=dtype, device=device)
    return SpeculativeGenerator(model, proposer, draft_length=draft_length, rule=rule), tokenizer


def summary(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Warnings of ours without the line of code that gave them."""
    ours = Path(filename).is_relative_to(Path(__file__).parents[1])
    return f"warning: {message}\n" if ours else format_of_others(message, category, filename, lineno, line)
