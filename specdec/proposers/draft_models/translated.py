"""`TranslatedDraftProposer`: a draft model with another tokenizer than the target's.

It drafts the tokens that both vocabularies have, compared by their bytes (token-level intersection, arXiv 2502.05202).
Drafts are therefore tokens of the target, and trees, sampling and verification need no change. Other tokens of the
text are spelled in the draft model's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from specdec.models.int8_linear import with_int8_linears, with_trimmed_head
from specdec.proposers.context import Context
from specdec.proposers.draft_models.draft_model import DraftModelProposer, decide_int8
from specdec.proposers.draft_models.token_translation import Translation
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import DynamicTree
from specdec.sampling.results import RoundResult
from specdec.utils.device_copies import uploaded
from specdec.utils.tokenizer_files import load_tokenizer

OF_A_TARGET = ("model", "vocab", "_view", "_shared", "_spelled", "_in_draft")  # attributes that depend on the target


class TranslatedDraftProposer(DraftModelProposer):
    """Drafts with a smaller model that has another tokenizer than the target.

    It drafts only tokens that both vocabularies have, compared by their bytes (token-level intersection, arXiv
    2502.05202). Other tokens of the text are spelled in the draft model's tokens.

    Args:
        model: the draft model, or a path or hub id to load one from.
        tokenizer: the draft model's tokenizer. None: the one next to its weights.
        target_tokenizer: the target's tokenizer. None: the one next to its weights.
        branching: see `DraftModelProposer`.
        tree: see `DraftModelProposer`.
        draw: see `DraftModelProposer`.
        int8: see `DraftModelProposer`.
        like: see `DraftModelProposer`.

    Raises:
        ValueError: for a target, if a tokenizer is missing or the two have no token in common.

    Example:
        ```python
        proposer = TranslatedDraftProposer(draft, tokenizer=draft_tokenizer, target_tokenizer=tokenizer)
        spec = SpeculativeGenerator(model, proposer)
        ```
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        *,
        tokenizer: Any = None,
        target_tokenizer: Any = None,
        branching: Sequence[int] | None = None,
        tree: DynamicTree | None = None,
        draw: bool = True,
        int8: bool | None = None,
        like: PreTrainedModel | None = None,
    ):
        self._shared: Tensor | None = None  # (K,) int64, the target's ids that the draft can propose
        super().__init__(model, branching=branching, tree=tree, draw=draw, int8=int8, like=like)
        self._tokenizers = tokenizer, target_tokenizer
        self._of_targets = WeakIdKeyDictionary()  # by the target's config, which views of the target share

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        self._of_targets[target.config] = {name: getattr(self, name) for name in OF_A_TARGET}

    def _check_vocabulary(self, target: PreTrainedModel) -> None:
        ours, theirs = (
            _tokenizer_of(model) if given is None else given
            for given, model in zip(self._tokenizers, (self.model, target), strict=True)
        )
        sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, self.model)]
        translation = Translation.between(theirs, ours, *sizes)
        if not translation.shared.numel():
            raise ValueError(
                "the draft model's tokenizer and the target's have no token in common: choose another draft model"
            )
        self._shared, self.vocab = translation.shared
        self._spelled = translation.spelled
        self._begin_with = list(ours("").input_ids)  # the draft model's begin-of-text tokens, if it has any
        self._in_draft = torch.zeros(sizes[0], dtype=torch.long).index_copy_(0, *translation.shared)
        self._settle()

    def _settle(self) -> None:
        """Make the view of the model that drafts shared tokens only. Each target gets a view of the same model."""
        self._view = self.model
        if self.vocab is not None:
            trimmed = with_trimmed_head(self.model, self.vocab)
            self._view = with_int8_linears(trimmed) if decide_int8(self._int8, self.model) else trimmed

    def known_tokens(self) -> Tensor | None:
        return self._shared

    def begin(self, context: Context) -> None:
        assert context.target is not None
        vars(self).update(self._of_targets[context.target.config])  # another target may have been checked since
        super().begin(context)
        # Per row: number of the text's tokens translated so far, and their spellings that are still to be processed.
        self._sent = [0] * context.batch_size
        self._unread = [list(self._begin_with) for _ in range(context.batch_size)]

    def propose(self, context: Context) -> DraftTree:
        for b, (end, pad, active) in enumerate(zip(context.ends, context.pads, context.active, strict=True)):
            if active and end - pad > self._sent[b]:
                new = context.recent(b, end - pad - self._sent[b])
                self._unread[b] += [token for word in new for token in self._spelled[word]]
                self._sent[b] = end - pad
        return super().propose(context)

    def observe(self, draft: DraftTree, result: RoundResult, accepted: Sequence[int]) -> None:
        before = list(self.runner.lengths)
        super().observe(draft, result, accepted)
        self._sent = [
            sent + after - had for sent, after, had in zip(self._sent, self.runner.lengths, before, strict=True)
        ]

    def _lengths(self, context: Context) -> list[int]:
        return [had + len(unread) for had, unread in zip(self.runner.lengths, self._unread, strict=True)]

    def _missing(self, context: Context) -> list[int]:
        return [len(unread) if active else 0 for unread, active in zip(self._unread, context.active, strict=True)]

    def capture(self, compiled: bool) -> None:
        """Do nothing: each target gets a view of the model of its own."""

    def newest(self, context: Context, most: int) -> None:
        """Return None: spelled tokens are not part of the text, so catching up is not captured."""

    def _unread_tokens(self, context: Context, missing: Sequence[int]) -> Tensor:
        pairs, width = list(zip(missing, self._unread, strict=True)), max(missing)
        self._unread = [unread[count:] for count, unread in pairs]
        return uploaded([[0] * (width - count) + unread[:count] for count, unread in pairs], self.runner.device)

    def _readable(self, tokens: Tensor) -> Tensor:
        if self._in_draft.device != tokens.device:
            self._in_draft = self._in_draft.to(tokens.device)
        return self._in_draft[tokens]


def _tokenizer_of(model: PreTrainedModel) -> Any:
    """Load the tokenizer next to the model's weights."""
    try:
        return load_tokenizer(model.name_or_path, local_files_only=True)
    except Exception as error:
        raise ValueError(
            f"found no tokenizer next to the weights of {model.name_or_path or type(model).__name__}: give both, "
            "TranslatedDraftProposer(model, tokenizer=..., target_tokenizer=...)"
        ) from error
