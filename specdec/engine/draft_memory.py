"""`DraftMemory`: what proposers have read of texts whose caches the caller keeps, as the turns of a conversation do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import DynamicCache

from specdec.engine.hf.prompt_layout import PromptLayout
from specdec.proposers.draft_state import DraftState
from specdec.utils.prefix import common_prefix


@dataclass(frozen=True)
class Remembered:
    """A proposer's state, and the tokens of each row; None where a call got only a part of them."""

    state: DraftState
    texts: Sequence[list[int]] | None


class DraftMemory:
    """States of a proposer by the cache (`past_key_values`) that a call has returned or extended.

    A state lives as long as its cache, and is replaced by the next call that continues from it.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[DynamicCache, Remembered] = WeakKeyDictionary()

    def keep(self, layout: PromptLayout, state: DraftState | None, texts: Sequence[Tensor]) -> None:
        """Keep the state of a call that has ended well.

        Args:
            layout: the call's prompt, with the cache that the call has returned or extended.
            state: the proposer's state; None: it has none.
            texts: tokens (T_b,) int64 of each row, as far as the call got them.
        """
        if layout.cache is None:
            return
        if state is None:
            self._kept.pop(layout.cache, None)
            return
        whole = layout.text == layout.real.shape[1]
        self._kept[layout.cache] = Remembered(state, [text.tolist() for text in texts] if whole else None)

    def recall(self, layout: PromptLayout, input_ids: Tensor) -> DraftState | None:
        """Return the state for a call, cut to what still holds. None if there is none.

        Args:
            layout: the call's prompt.
            input_ids: (B, T) int64, the whole text or its new part.
        """
        remembered = self._kept.get(layout.cache) if layout.cache is not None and layout.cached else None
        if remembered is None or len(remembered.state.lengths) != len(layout.real):
            return None
        cached = layout.real[:, : layout.cached].sum(1).tolist()
        if remembered.texts is None or layout.text < layout.real.shape[1]:  # nothing to compare
            return remembered.state.up_to(cached, cached)
        rows = zip(input_ids.tolist(), layout.real.tolist(), remembered.texts, strict=True)
        same = [
            common_prefix(before, [token for token, real in zip(ids, mask, strict=True) if real])
            for ids, mask, before in rows
        ]
        return remembered.state.up_to(cached, same)
