"""The draft vocabulary: the tokens that a head can draft, those that the target writes most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.data.texts import Text, Texts

AT_ONCE = 2**20  # tokens that are counted together


def token_counts(texts: Sequence[Text], vocab_size: int, *, all_tokens: bool = False) -> Tensor:
    """(V,) int64, how often the target wrote each token, or how often texts hold it, prompts and all."""
    texts = Texts.of(texts)
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids, learn in zip(texts.ids.split(AT_ONCE), texts.learn.split(AT_ONCE), strict=True):
        counts += torch.bincount(ids if all_tokens else ids[learn.bool()], minlength=vocab_size)
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
