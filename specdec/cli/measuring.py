"""Shared parts of `bench` and `doctor`: encoded prompts, and the printed results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.data.messages import Conversation
    from specdec.evaluation.bench import Bench
    from specdec.evaluation.diagnosis import Diagnosis


def encoded(asked: Sequence[Conversation], tokenizer: Any, model: Any, max_new_tokens: int) -> list[Tensor]:
    """Tokenize conversations up to the answer, (T,) int64 each.

    Those that the chat template refuses, or the model cannot answer, are left out.
    """
    import torch

    from specdec.data.conversations import encode_prompt
    from specdec.data.skipped import Skipped
    from specdec.models.text_limits import check_prompt

    prompts, left_out = [], Skipped("prompts")
    for one in asked:
        try:
            tokens = encode_prompt(one.messages, tokenizer, **one.template)
            if not tokens:
                raise ValueError("the tokenizer returns no tokens for it")
            check_prompt(model, tokens, max_new_tokens)
            prompts.append(torch.tensor(tokens))
        except ValueError as error:
            left_out.add(one.place, error)
    if asked:
        left_out.check_and_warn(len(prompts))
    return prompts


def built_in(tokenizer: Any, limit: int, model: Any, max_new_tokens: int) -> list[Tensor]:
    """Tokenize the first `limit` of the built-in prompts, (T,) int64 each, as `encoded` does."""
    from specdec.data.messages import Conversation
    from specdec.data.prompts import PROMPTS

    asked = [
        Conversation([{"role": "user", "content": prompt.text}], place=f"the built-in prompt {prompt.name!r}")
        for prompt in PROMPTS[:limit]
    ]
    return encoded(asked, tokenizer, model, max_new_tokens)


def print_results(
    found: Bench | Diagnosis, answered: int, available: int, file: Path | None, max_new_tokens: int
) -> None:
    """Print which prompts of which file were answered, and the results."""
    count = f"{answered:,} of {available:,}" if answered < available else f"{available:,}"
    turns = f" in {found.repeats} turns" if found.repeats > 1 else ""
    prompts = f"{count} prompts of {file or 'the built-in ones'}{turns}"
    typer.echo(f"measured on {prompts}, up to {max_new_tokens} new tokens each, in whole calls\n")
    typer.echo(found.summary())
