"""`Replay`: a proposer whose acceptance is set, not found. It drafts the text that will be written, in part wrongly.

Verification is real: the target runs over the draft, and keeps what it would have written. So a round's cost can be
measured at any acceptance, on any model, trained or not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec import Context, DraftTree, Proposer
from specdec.models.hidden_states import Taps
from specdec.sampling.results import Verdict
from specdec.utils.device_copies import uploaded


class Replay(Proposer):
    """Drafts chains, of the generator's `draft_length`.

    Args:
        texts: what each row will hold, prompt included, without padding. right: share of tokens that are drafted right,
            each by itself; a wrong one ends what is accepted of its draft. vocab_size: of the target.
        behind: a proposer that drafts chains as ever, and at its own cost; the tokens are then replaced by ours.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        right: float,
        vocab_size: int,
        behind: Proposer | None = None,
        seed: int = 0,
    ):
        chances = Random(seed)
        self._drafts = [
            [token if chances.random() < right else (token + 1) % vocab_size for token in text] for text in texts
        ]
        self.behind = behind

    def propose(self, context: Context) -> DraftTree:
        if self.behind is None:
            return context.chain([self._next(context, b, context.pacer.limit) for b in range(context.batch_size)])
        draft = self.behind.propose(context)
        drafted = [self._next(context, b, draft.size - 1) for b in range(context.batch_size)]
        padded = [[*row, *[0] * (draft.size - 1 - len(row))] for row in drafted]
        tokens = draft.tokens.clone()
        tokens[:, 1:] = uploaded(padded, tokens.device)
        return replace(draft, tokens=tokens, probs=None)

    def _next(self, context: Context, b: int, count: int) -> list[int]:
        written = context.ends[b] - context.pads[b]
        return self._drafts[b][written : written + count]

    # What the proposer behind is told

    def taps(self, target: PreTrainedModel) -> Taps | None:
        return None if self.behind is None else self.behind.taps(target)

    def check(self, target: PreTrainedModel) -> None:
        if self.behind is not None:
            self.behind.check(target)

    def begin(self, context: Context) -> None:
        if self.behind is not None:
            self.behind.begin(context)

    def drafting_model(self) -> nn.Module | None:
        return None if self.behind is None else self.behind.drafting_model()

    def observe(self, draft: DraftTree, verdict: Verdict, accepted: Sequence[int]) -> None:
        if self.behind is not None:
            self.behind.observe(draft, verdict, accepted)

    def __copy__(self) -> Replay:
        """A call's own: so is the proposer behind."""
        made: Any = object.__new__(type(self))
        made.__dict__.update(self.__dict__, behind=copy.copy(self.behind))
        return made


def recorded(output: Tensor, pads: Sequence[int]) -> list[list[int]]:
    """`Replay`'s texts of what `generate()` gave, (B, T) int64, of prompts with this much padding on the left."""
    return [row[pad:].tolist() for row, pad in zip(output, pads, strict=True)]
