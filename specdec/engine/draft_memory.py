"""`DraftMemory`: what proposers have read of texts whose caches the caller keeps, as the turns of a conversation do."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import DynamicCache

from specdec.engine.hf.prompt_layout import PromptLayout
from specdec.proposers.context import Context
from specdec.proposers.draft_state import DraftState
from specdec.utils.prefix import common_prefix


class DraftMemory:
    """States of a proposer by the cache (`past_key_values`) that a call has returned or extended.

    A state lives as long as its cache. The next call that continues from the cache takes it out.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[DynamicCache, tuple[DraftState, list[list[int]]]] = WeakKeyDictionary()

    def keep(self, cache: DynamicCache, state: DraftState | None, final: Context) -> None:
        """Keep the state of a call.

        Args:
            cache: the cache that the call has returned or extended.
            state: the proposer's state; None: it has none.
            final: the final state of the batch, with the texts.
        """
        if state is not None:
            self._kept[cache] = state, [final.row(b).tolist() for b in range(final.batch_size)]

    def take(self, layout: PromptLayout, input_ids: Tensor) -> DraftState | None:
        """Take out the state for a call, cut to what still holds. None if there is none.

        Args:
            layout: the call's prompt.
            input_ids: (B, T) int64, the whole text or its new part.
        """
        cache = layout.cache
        if cache is None or not layout.cached or cache not in self._kept:
            return None
        state, texts = self._kept.pop(cache)
        cached = layout.real[:, : layout.cached].sum(1).tolist()
        if len(texts) != len(cached):
            return None
        if layout.text < layout.real.shape[1]:  # only new tokens: nothing to compare
            return state.up_to(cached, cached) if state.known == cached else None
        rows = zip(input_ids.tolist(), layout.real.tolist(), texts, strict=True)
        same = [
            common_prefix(before, [token for token, real in zip(ids, mask, strict=True) if real])
            for ids, mask, before in rows
        ]
        return state.up_to(cached, same)
