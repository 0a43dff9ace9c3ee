"""Shared parts of the commands: messages to the user, and loading of models."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specdec.utils.choices import WITH_NGRAMS, NumberFormat, RuleName, check_name
from specdec.utils.paths import require_folder_or_id
from specdec.utils.tokenizer_files import load_tokenizer, require_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specdec.engine.generator import SpeculativeGenerator

INTERRUPTED = 130  # exit code of shells: 128 plus the number of SIGINT

OURS = "specdec: "  # how warnings of a generator begin
COLOURS = {"": None, "warning": "yellow"}  # of other kinds of messages: red
default_format = warnings.formatwarning


def print_message(text: object, kind: str = "") -> None:
    """Print a message on standard error: standard output is for results.

    Args:
        kind: word before the text, such as "warning" or "error".
    """
    line = typer.style(f"{kind}: {text}", fg=COLOURS.get(kind, "red")) if kind else text
    typer.echo(line, err=True)


class MessageHandler(logging.Handler):
    """Prints the library's log messages, such as progress of slow steps."""

    def emit(self, record: logging.LogRecord) -> None:
        print_message(record.getMessage())


def show_messages() -> None:
    """Show the library's log messages and warnings as single lines."""
    warnings.formatwarning = summary
    log = logging.getLogger("specdec")
    log.setLevel(logging.INFO)
    if not any(isinstance(handler, MessageHandler) for handler in log.handlers):
        log.addHandler(MessageHandler())


def summary(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format warnings of specdec without the source line that raised them.

    Those of a generator begin with "specdec: ". They point at the caller's line, which for a command is typer's.
    """
    text, ours = str(message), Path(filename).is_relative_to(Path(__file__).parents[1])
    if ours or text.startswith(OURS):
        return f"warning: {text.removeprefix(OURS)}\n"
    return default_format(message, category, filename, lineno, line)


def print_versions(err: bool = False) -> None:
    """Print the installed releases, and a warning if specdec fails or was not tested with them.

    Imports torch only if a release was not tested.
    """
    from specdec import __version__
    from specdec.utils.releases import TESTED, advice, is_tested, summary

    typer.echo(f"specdec {__version__}, {summary()}", err=err)
    untested = [advice(package) for package in TESTED if not is_tested(package)]
    if not untested:
        return
    try:
        from specdec.models.capability import installation_fault

        fault = installation_fault()
    except ImportError as error:
        fault = f"specdec cannot be imported here ({error}). {' '.join(untested)}"
    for text in [fault] if fault else untested:
        print_message(text, "warning")


def interrupted(text: str = "stopped") -> typer.Exit:
    """Print a message and return the exception to raise after Ctrl-C."""
    print_message(text)
    return typer.Exit(INTERRUPTED)


@contextmanager
def resumable(message: Callable[[], str]) -> Iterator[None]:
    """Exit after Ctrl-C within this context, with a line that `message` returns: what is kept, and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        raise interrupted(message()) from None


def check(target: str, proposer: str = "auto", tokenizer: bool = True) -> None:
    """Raise ValueError for names that can be rejected without importing torch.

    tokenizer: True if the command needs the target's tokenizer.
    """
    check_name(proposer)
    kind, _, source = proposer.removeprefix(WITH_NGRAMS).partition(":")
    source = "" if kind == "exit" else source  # followed by a number of layers
    for name in filter(None, (target, source)):
        require_folder_or_id(name)
    if tokenizer:
        require_tokenizer(target)


def load(
    target: str, tokenizer: bool = True, dtype: NumberFormat | None = None, device: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer.

    Args:
        target: path or hub id.
        tokenizer: load the tokenizer; otherwise None is returned for it.
        dtype: name of the number format, or "auto" for the fastest on this device. None: as saved.
        device: name of the device. None: the best one available.
    """
    from specdec.models.cpu_threads import warn_of_excess_threads
    from specdec.models.hardware import best_device, crowded, format_for
    from specdec.models.loading import load as loaded
    from specdec.models.number_format import convert

    place = _device(device) if device else best_device()
    warn_of_excess_threads(place)
    if others := crowded(place):
        print_message(others)
    model = loaded(target).to(place)
    if dtype is not None:
        chosen, why = format_for(dtype, model.dtype, model.device, model.num_parameters())
        convert(model, chosen)
        print_message(f"computing in {str(chosen).removeprefix('torch.')} on {model.device}: {why}")
    return model, load_tokenizer(target) if tokenizer else None


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name} is not a device of this machine: {str(error).partition(chr(10))[0]}") from error
    return device


def sampling(temperature: float, seed: int | None = None) -> dict[str, Any]:
    """Return the sampling arguments of `generate()`, after seeding torch if a seed is given."""
    import torch

    from specdec.data.batched_generation import sampling as arguments

    if seed is not None:
        torch.manual_seed(seed)
    return arguments(temperature)


def generator(
    target: str,
    proposer: str,
    draft_length: int | None,
    rule: RuleName,
    exact: bool,
    dtype: NumberFormat,
    device: str | None,
) -> tuple[SpeculativeGenerator, Any]:
    """Build a generator from the options, and return it with the tokenizer."""
    from specdec.engine.generator import SpeculativeGenerator

    model, tokenizer = load(target, dtype=dtype, device=device)
    return SpeculativeGenerator(model, proposer, draft_length=draft_length, rule=rule, exact=exact), tokenizer
