"""Checks that a model can read a text: its tokens have embeddings, and its positions exist.

A model fails on other texts with errors of torch, or, on a GPU, in a way that ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from specdec.models.capability import capability


def vocab_size(model: PreTrainedModel) -> int:
    """Number of tokens that a model has embeddings for."""
    rows = model.get_input_embeddings().weight.shape[0]
    return rows or model.config.get_text_config(decoder=True).vocab_size  # no rows: DeepSpeed has taken them


def check_tokens(tokens: Sequence[int], size: int) -> None:
    """Raise ValueError for a token outside of a vocabulary of this size.

    Examples:
        >>> check_tokens([1, 7], 7)
        Traceback (most recent call last):
        ...
        ValueError: it has token 7, but the model has 7: use the model's own tokenizer, or resize its embeddings
    """
    if max(tokens, default=0) >= size:
        raise ValueError(
            f"it has token {max(tokens)}, but the model has {size}: use the model's own tokenizer, or resize its "
            "embeddings"
        )


def space_after(model: PreTrainedModel, tokens: Sequence[int]) -> int | None:
    """Return how many tokens the model can write after a prompt; None for a model without a fixed number of positions.

    Raises:
        ValueError: it cannot read the prompt, or write anything after it.
    """
    check_tokens(tokens, vocab_size(model))
    positions = capability(model).positions
    if positions is None or model.config.is_encoder_decoder:
        return None
    if len(tokens) > positions:
        raise ValueError(f"it has {len(tokens)} tokens, and the model reads {positions} at most: use a shorter one")
    return positions - len(tokens) + 1  # the last token is written, but not read


def check_prompt(model: PreTrainedModel, tokens: Sequence[int], max_new_tokens: int) -> None:
    """Raise ValueError if the model cannot write so many tokens after a prompt."""
    space = space_after(model, tokens)
    if space is not None and max_new_tokens > space:
        raise ValueError(
            f"it has {len(tokens)} tokens, and the model reads {len(tokens) + space - 1} at most: use --max-new-tokens "
            f"{space} or less"
        )
