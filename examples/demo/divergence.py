"""`Divergence`: the position where two greedy texts of one model diverge, and the gap between the logits there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.utils.prefix import common_prefix

# Rounding in dozens of layers adds up to a few units in the last place of a logit. A gap of more than four units is no
# near tie.
NEAR_TIE = 4


@dataclass(frozen=True)
class Divergence:
    """Two texts that agree up to `index` and then differ.

    Attributes:
        index: position of the first different token.
        plain: token of plain decoding at this position; None if its text has ended.
        speculative: token of speculative decoding at this position; None if its text has ended.
        top: largest logit at this position.
        gap: difference between the two largest logits.
    """

    index: int
    plain: int | None
    speculative: int | None
    top: float
    gap: float

    def near_tie(self, dtype: torch.dtype) -> bool:
        """Return whether rounding in `dtype` alone can explain the difference."""
        return self.gap <= NEAR_TIE * torch.finfo(dtype).eps * max(1.0, abs(self.top))

    def explain(self, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> str:
        """Describe the difference in one line."""
        names = [_name(token, tokenizer) for token in (self.plain, self.speculative)]
        where = f"texts diverge at token {self.index + 1} ({names[0]} or {names[1]})"
        gap = f"the two best logits are {self.gap:.3f} apart there (the best is {self.top:.1f})"
        number_format = str(dtype).removeprefix("torch.")
        if self.near_tie(dtype):
            why = f"in {number_format} a pass over several tokens rounds differently than one over a single token"
            return f"{where}: {why}, and {gap}: a near tie."
        return f"{where}: {gap}, more than rounding in {number_format} explains. Please report this."


def near_ties(count: int, dtype: torch.dtype) -> str:
    """Say in one line why `count` texts differ from plain decoding's, each from a near tie on."""
    texts = "1 text differs" if count == 1 else f"{count} texts differ"
    name = str(dtype).removeprefix("torch.")
    return (
        f'"no" under "same tokens": {texts} after a near tie, two tokens equal within {name}\'s rounding. '
        "In float32, or with exact=True, all texts are the same."
    )


def first_difference(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing in one text; None if the texts are the same."""
    index = common_prefix(plain, speculative)
    return None if index == len(plain) == len(speculative) else index


@torch.no_grad()
def diverge(
    model: PreTrainedModel, prompt: torch.Tensor, plain: Sequence[int], speculative: Sequence[int]
) -> Divergence | None:
    """Compare two continuations of `prompt` (1, T); None if they are the same."""
    index = first_difference(plain, speculative)
    if index is None:
        return None
    agreed = torch.tensor([list(plain[:index])], dtype=prompt.dtype, device=prompt.device)  # (1, index)
    logits = model(torch.cat([prompt, agreed], dim=1), use_cache=False).logits[0, -1].float()  # (V,)
    top, second = logits.topk(2).values.tolist()
    tokens = [text[index] if index < len(text) else None for text in (plain, speculative)]
    return Divergence(index, tokens[0], tokens[1], top, top - second)


def _name(token: int | None, tokenizer: PreTrainedTokenizerBase) -> str:
    return "the end" if token is None else repr(tokenizer.decode([token]))
