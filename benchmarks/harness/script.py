"""Shared parts of the scripts: options, log, loading of models, and the line about the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.harness import machine

Dtype = Annotated[str, typer.Option(help="Number format: auto (as saved), bfloat16, float16 or float32.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of torch threads. Default: chosen by torch.")]
Proposers = Annotated[
    list[str] | None, typer.Option(help="Proposer, in the format of SpeculativeGenerator; may be repeated.")
]
MaxPromptTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum tokens of a prompt; longer ones are shortened.")
]
log = Console(stderr=True, highlight=False)


@contextmanager
def bad_input_ends() -> Iterator[None]:
    """End on bad input with an error message instead of a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:  # OSError: no such model or file
        log.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


def prepare(threads: int | None = None) -> None:
    """Silence transformers, and set the number of torch threads."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)


@lru_cache(maxsize=2)
def load(path: str, dtype: str, device: str = "cpu") -> PreTrainedModel:
    """Load models once for several options, for example with other prompts or batch sizes."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def conditions(model: PreTrainedModel, max_new_tokens: int) -> str:
    """Machine and settings of a measurement, in one line."""
    return f"{machine.cpu_model()}, {torch.get_num_threads()} threads, {model.dtype}, {max_new_tokens} new tokens"
