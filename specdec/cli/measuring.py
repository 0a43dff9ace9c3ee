"""Shared parts of `bench` and `doctor`: encoded prompts, and a progress bar on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.data.messages import Asked


def encoded(asked: Sequence[Asked], tokenizer: Any) -> list[Tensor]:
    """Tokenize conversations up to the answer, (T,) int64 each. Those that the chat template refuses are left out."""
    import torch

    from specdec.data.conversations import encode_prompt
    from specdec.data.skipped import LeftOut

    prompts, left_out = [], LeftOut("prompts")
    for one in asked:
        try:
            tokens = encode_prompt(one.messages, tokenizer, **one.template)
            if not tokens:
                raise ValueError("the tokenizer returns no tokens for it")
            prompts.append(torch.tensor(tokens))
        except ValueError as error:
            left_out.add(one.place, error)
    if asked:
        left_out.settle(len(prompts))
    return prompts


def of_ours(tokenizer: Any, limit: int) -> list[Tensor]:
    """Tokenize the first `limit` of the built-in prompts, (T,) int64 each."""
    from specdec.data.prompts import PROMPTS

    return [prompt.encode(tokenizer)["input_ids"][0] for prompt in PROMPTS[:limit]]


def on_prompts(answered: int, available: int, file: Path | None) -> str:
    """Describe how many prompts of which file were answered."""
    count = f"{answered:,} of {available:,}" if answered < available else f"{available:,}"
    return f"{count} prompts of {file or 'specdec'}"


@contextmanager
def bar() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, and yield a function to call with the numbers of finished and of all calls."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
