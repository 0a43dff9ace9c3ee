"""`Replay`: a proposer with a given acceptance rate, which drafts a known text with a share of wrong tokens.

Verification is real: the target runs over the draft and accepts only its own tokens. The cost of a round can thus be
measured at any acceptance rate and on any model, trained or not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec import Context, DraftTree, Proposer
from specdec.models.hidden_states import Taps
from specdec.sampling.results import NewTokens, RoundResult
from specdec.utils.device_copies import uploaded


class Replay(Proposer):
    """Drafts from known texts: chains of the generator's `draft_length`, or the drafts of another proposer.

    The other proposer runs as it does alone: it drafts ahead and is captured. Only its tokens are replaced, after they
    were drafted: all of a chain's, and those on the path to the deepest node of a tree.

    Args:
        texts: expected text of each row, including the prompt, without padding.
        right: share of correct draft tokens, independently of each other. Acceptance ends at the first wrong token.
        vocab_size: vocabulary size of the target.
        inner: optional deterministic proposer that drafts at its own cost; its tokens are then replaced.
    """

    paces_itself = True

    def __init__(self, texts: Sequence[Sequence[int]], right: float, vocab_size: int, inner: Proposer | None = None):
        chances = Random(0)
        self._drafts = [
            [token if chances.random() < right else (token + 1) % vocab_size for token in text] for text in texts
        ]
        self.inner = inner

    def propose(self, context: Context) -> DraftTree:
        if self.inner is None:
            return context.chain([self._next(context, b, context.pacer.limit) for b in range(context.batch_size)])
        draft = self.inner.paced_draft(context)
        if draft.size == 1:
            return draft
        drafted = [self._next(context, b, draft.size - 1) for b in range(context.batch_size)]
        padded = uploaded([[0, *row, *[0] * (draft.size - 1 - len(row))] for row in drafted], draft.tokens.device)
        root = torch.arange(draft.size, device=draft.tokens.device) == 0
        if draft.chain:
            return replace(draft, tokens=torch.where(root, draft.tokens, padded), probs=None)
        deepest = draft.depth.argmax(-1)[:, None, None].expand(-1, 1, draft.size)
        on_path = draft.ancestors.gather(1, deepest)[:, 0] & ~root
        return replace(draft, tokens=torch.where(on_path, padded.gather(1, draft.depth), draft.tokens), probs=None)

    def _next(self, context: Context, b: int, count: int) -> list[int]:
        written = context.ends[b] - context.pads[b]
        return self._drafts[b][written : written + count]

    # Calls passed on to the inner proposer

    def taps(self, target: PreTrainedModel) -> Taps | None:
        return None if self.inner is None else self.inner.taps(target)

    def check(self, target: PreTrainedModel) -> None:
        if self.inner is not None:
            self.inner.check(target)

    def capture(self, compiled: bool) -> None:
        if self.inner is not None:
            self.inner.capture(compiled)

    def drafting_model(self) -> nn.Module | None:
        return None if self.inner is None else self.inner.drafting_model()

    def begin(self, context: Context) -> None:
        if self.inner is not None:
            self.inner.begin(context)

    def sync(self, context: Context) -> None:
        if self.inner is not None:
            self.inner.sync(context)

    def draft_ahead(self, context: Context, new_tokens: NewTokens) -> None:
        if self.inner is not None:
            self.inner.draft_ahead(context, new_tokens)

    def observe(self, draft: DraftTree, result: RoundResult, accepted: Sequence[int]) -> None:
        if self.inner is not None:
            self.inner.observe(draft, result, accepted)

    def end(self, context: Context) -> None:
        if self.inner is not None:
            self.inner.end(context)

    def __copy__(self) -> Replay:
        """Copy the proposer for one call, together with `inner`."""
        made: Any = object.__new__(type(self))
        made.__dict__.update(self.__dict__, inner=copy.copy(self.inner))
        return made


def recorded(output: Tensor, pads: Sequence[int]) -> list[list[int]]:
    """Return texts for `Replay` from an output of `generate()`, (B, T) int64, without the padding on the left."""
    return [row[pad:].tolist() for row, pad in zip(output, pads, strict=True)]
