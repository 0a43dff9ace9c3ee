"""What the commands share: loading what they are asked for, and saying what is wrong with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specdec.proposers.named import PROPOSERS_IN_WORDS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specdec import SpeculativeGenerator
    from specdec.proposers import Proposer

WHAT_DRAFTS = f"What drafts: {PROPOSERS_IN_WORDS}."
DEVICE = '"cpu", "cuda", ...: the best there is if left out.'
DRAFT_LENGTH = "Tokens to draft per round, 0: none; by measured costs if left out."
SEED = "Of what is drawn: the same seed gives the same text."
NUMBER_FORMAT = "auto (what is fastest here, in place of bfloat16), bfloat16, float16 or float32."

format_of_others = warnings.formatwarning


@contextmanager
def bad_input_ends() -> Iterator[None]:
    """What the library says of bad input, without a traceback; exit code 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:  # OSError: no such model or file
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error


def load(
    target: str, tokenizer: bool = True, dtype: str | None = None, device: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer.

    Args:
        dtype: number format by its name, "auto" for what is fastest here, which is said; None: as saved.
        device: by its name; None: the best there is.
    """
    from transformers import AutoTokenizer

    from specdec.machine import best_device, format_for, number_format
    from specdec.proposers.draft_model import load as loaded

    place = _device(device) if device else best_device()
    if dtype is not None:
        number_format(dtype, place)  # raises, before the model is loaded, if there is no such format
    model = loaded(target).to(place)
    if dtype is not None:
        chosen, why = format_for(dtype, model.dtype, model.device, model.num_parameters())
        model = model.to(chosen)
        typer.echo(f"computing in {str(chosen).removeprefix('torch.')} on {model.device}: {why}", err=True)
    return model, AutoTokenizer.from_pretrained(target) if tokenizer else None


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name} is no device of this machine: {str(error).partition(chr(10))[0]}") from error
    return device


def sampling(temperature: float, seed: int | None = None) -> dict[str, Any]:
    """Arguments of `generate()`. seed: torch's, set now."""
    import torch

    if seed is not None:
        torch.manual_seed(seed)
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}


def drafting(proposer: str, target: PreTrainedModel) -> Proposer | str:
    """What `proposer` names; a draft model in the target's number format, and on its device."""
    from specdec.proposers import DraftModelProposer, HybridProposer
    from specdec.proposers.draft_model import load as loaded
    from specdec.proposers.named import WITH_NGRAMS

    kind, _, source = proposer.partition(":")
    if not kind.endswith("draft"):
        return proposer
    made = DraftModelProposer(loaded(source).to(target.device, target.dtype))
    return HybridProposer(made) if kind.startswith(WITH_NGRAMS) else made


def generator(
    target: str, proposer: str, draft_length: int | None, dtype: str, device: str | None
) -> tuple[SpeculativeGenerator, Any]:
    """A generator of what the options name, and the tokenizer."""
    from specdec import SpeculativeGenerator

    model, tokenizer = load(target, dtype=dtype, device=device)
    return SpeculativeGenerator(model, drafting(proposer, model), draft_length=draft_length), tokenizer


def in_words(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Warnings of ours without the line of code that gave them."""
    ours = Path(filename).is_relative_to(Path(__file__).parents[1])
    return f"warning: {message}\n" if ours else format_of_others(message, category, filename, lineno, line)
