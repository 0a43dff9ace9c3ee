"""Draft vocabulary: the tokens that a head can draft, the most frequent ones in the answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.data.texts import Text, Texts

AT_ONCE = 2**20  # tokens counted at a time


def token_counts(texts: Sequence[Text], vocab_size: int, *, all_tokens: bool = False) -> Tensor:
    """Count how often each token is in an answer, (V,) int64. all_tokens: count prompts as well."""
    texts = Texts.of(texts)
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids, learn in zip(texts.ids.split(AT_ONCE), texts.learn.split(AT_ONCE), strict=True):
        counts += torch.bincount(ids if all_tokens else ids[learn.bool()], minlength=vocab_size)
    return counts


def frequent_tokens(counts: Tensor, size: int, read: Tensor | None = None) -> Tensor:
    """Choose the draft vocabulary: the most frequent tokens.

    Args:
        counts: (V,) int64, how often each token is in an answer.
        size: number of tokens to choose, at most V.
        read: (V,) int64, counts over prompts and answers. They break ties among the many tokens that are in answers
            once or never, since the target may later write what it reads.

    Returns:
        (K,) int64, token ids, ascending.

    Examples:
        >>> frequent_tokens(torch.tensor([3, 0, 5, 1]), 2)
        tensor([0, 2])
    """
    if read is not None:
        counts = counts * (read.max() + 1) + read
    return counts.topk(min(size, len(counts))).indices.sort().values
