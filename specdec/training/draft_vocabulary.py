"""The draft vocabulary: the tokens that a head can draft, those that the target writes most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_counts(texts: Sequence[tuple[Tensor, Tensor]], vocab_size: int) -> Tensor:
    """(V,) int64, how often the target wrote each token.

    Args:
        texts: ids and learn flags, (T,) each.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids, learn in texts:
        counts += torch.bincount(ids[learn.bool()], minlength=vocab_size)
    return counts


def frequent_tokens(counts: Tensor, size: int, read: Tensor | None = None) -> Tensor:
    """The draft vocabulary, (K,) int64 ascending: the `size` tokens, or all, with the highest counts (V,).

    Args:
        read: (V,) int64, how often prompts and all hold each token: what the target did not write yet, it may write
            of what it reads. It decides where counts are even, as they are of the many that were written once or never.
    """
    if read is not None:
        counts = counts * (read.max() + 1) + read
    return counts.topk(min(size, len(counts))).indices.sort().values
