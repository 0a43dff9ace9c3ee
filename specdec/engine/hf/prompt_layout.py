"""`PromptLayout`: a call's prompt, of which an earlier call may have cached a part.

It converts between the columns of `generate()` and `DynamicCache`, and the ragged rows of our cache. A row consists of
its columns without those that the attention mask excludes, on the left or between two turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from specdec.models.cache.ragged_rows import CachedRows
from specdec.models.compat import (
    CACHE,
    CONTINUABLE_LAYERS,
    cache_in,
    fill_attention_layer,
    fill_recurrent_layer,
    mask_width,
)


@dataclass(frozen=True)
class _Hidden:
    """Cached states of columns that a call's mask excludes. They are not in its rows, but a later call may show them.

    Attributes:
        columns: (n,) int64, columns that are excluded in some rows, but lie after the row's padding on the left.
        rows: (B, n) bool, True where they are.
        states: keys and values (B, heads, n, dim), and the indexer's keys (B, n, dim), of each layer by its index.
    """

    columns: Tensor
    rows: Tensor
    states: dict[int, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, real: Tensor) -> _Hidden | None:
        """Find them in the mask `real` (B, C) of the cached columns; None if there are none."""
        hidden = ~real & (real.cumsum(1) > 0)
        columns = hidden.any(0).nonzero()[:, 0]
        return cls(columns, hidden[:, columns]) if len(columns) else None

    def keep(self, index: int, *held: Tensor | None) -> None:
        """Copy them from what a layer holds of all columns, (B, heads, C, dim) or (B, C, dim)."""
        self.states[index] = [
            states.index_select(-2, self.columns.to(states.device)) for states in held if states is not None
        ]

    def restore(self, index: int, *held: Tensor | None) -> None:
        """Write them into what a layer holds."""
        ours = [states for states in held if states is not None]
        for states, kept in zip(ours, self.states.get(index, ()), strict=False):  # none of a layer that held nothing
            at, hides = self.columns.to(states.device), self.rows.to(states.device)
            hides = hides[:, None, :, None] if states.dim() == 4 else hides[..., None]
            states[..., at, :] = torch.where(hides, kept.to(states.device), states[..., at, :])


@dataclass(frozen=True)
class PromptLayout:
    """B rows of C columns, of which the first `cached` are in `cache` and the others are still to be read.

    Attributes:
        real: (B, C) bool, on the host, True for text and False for padding.
        cached: number of columns in the cache.
        text: number of columns in `input_ids`, which are the last ones: C, unless only new columns were given.
        cache: the caller's cache, extended in place when the call ends; None if the caller cannot see it.
    """

    real: Tensor
    cached: int
    text: int
    cache: DynamicCache | None = None

    @property
    def fresh(self) -> list[int]:
        """Number of tokens of each row that are still to be read."""
        return self.real[:, self.cached :].sum(1).tolist()

    @property
    def pads(self) -> Tensor | None:
        """Number of padding columns (B, 1) int64 before each row's text; None if there are none."""
        pads = self.real.int().argmax(1, keepdim=True)
        return pads if bool(pads.any()) else None

    @property
    def text_pads(self) -> list[int]:
        """Number of padding columns of each row of `input_ids`."""
        return (~self._text).sum(1).tolist()

    @cached_property
    def text_order(self) -> Tensor | None:
        """Columns (B, T) int64 of `input_ids` with all padding first; None if they are in this order."""
        return None if left_padded(self._text) else _padding_first(self._text)

    @property
    def _text(self) -> Tensor:
        return self.real[:, self.real.shape[1] - self.text :]

    def unread(self, given: Tensor) -> tuple[Tensor, list[int]]:
        """Select the tokens that are still to be read, without columns that are padding in every row.

        Args:
            given: (B, <= C) ids or (B, <= C, H) embeddings.

        Returns:
            Tokens (B, W, ...), left-padded, and the number of padding columns of each row.
        """
        real = self.real[:, self.cached :]
        pads = (~real).sum(1).tolist()
        order = _padding_first(real)[:, min(pads) :].to(given.device)
        given = given[:, given.shape[1] - real.shape[1] :]
        shape = (*order.shape, *given.shape[2:])
        index = order.reshape(*order.shape, *[1] * (given.dim() - 2)).expand(shape)
        return given.gather(1, index), [pad - min(pads) for pad in pads]

    def as_given(self, states: Tensor) -> Tensor:
        """Arrange states (B, W, H) of the tokens from `unread` in the call's columns; zeros for columns left out."""
        real = self.real[:, self.cached :]
        states = torch.nn.functional.pad(states, (0, 0, real.shape[1] - states.shape[1], 0))
        back = _padding_first(real).argsort(1).to(states.device)
        return states.gather(1, back[..., None].expand_as(states))

    @contextmanager
    def in_rows(self, rows: CachedRows) -> Iterator[list[int]]:
        """Move the cache's keys, values and states into the rows within this context, and back at its end.

        Yields:
            A list, to which the caller appends the number of columns to move back. If the call fails before that, the
            cache is restored, or emptied if sliding windows have dropped a part of it.
        """
        cache = self.cache
        columns: list[int] = []
        # Sliding windows hold no such columns: a call with them runs plain.
        hidden = _Hidden.of(self.real[:, : self.cached]) if self._keeps_all else None
        rows.start(len(self.real), keeps_all=self._keeps_all)
        try:
            if self.cached:
                self._hand_over(rows, hidden)
            yield columns
        finally:
            if cache is not None:
                self._give_back(rows, cache, columns[0] if columns else self.cached, hidden)
                if not columns and any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers):
                    for layer in cache.layers:
                        fill_attention_layer(layer, None, None, 0)
                        if hasattr(layer, "has_previous_state"):
                            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, False)

    @property
    def _keeps_all(self) -> bool:
        """True for a user's cache without sliding-window layers, which must be returned with all columns."""
        user_defined = getattr(self.cache, "_is_user_defined", False)
        return user_defined and not any(isinstance(layer, DynamicSlidingWindowLayer) for layer in self.cache.layers)

    def _hand_over(self, rows: CachedRows, hidden: _Hidden | None) -> None:
        assert self.cache is not None
        real = self.real[:, : self.cached]
        rows.cache.begin_at(real.sum(1).tolist())
        columns = (~real).int().argsort(dim=1, stable=True)  # (B, cached) columns of each row's tokens, in order
        for index, layer in enumerate(self.cache.layers):
            rows.cache.states.put_layer(index, layer, rows.cache.lengths)
            if getattr(layer, "keys", None) is not None:
                keys, values = layer.keys, layer.values
                indexed = getattr(layer, "indexer_keys", None)
                if getattr(layer, "indexer_position_ids", None) is not None:
                    rows.cache.indexer_position_ids = layer.indexer_position_ids
                if hidden is not None:
                    hidden.keep(index, keys, values, indexed)
                rows.cache.put(index, keys, values, columns - (self.cached - keys.shape[2]), indexed)
                layer.keys = layer.values = None

    def _give_back(self, rows: CachedRows, cache: DynamicCache, columns: int, hidden: _Hidden | None) -> None:
        grown = torch.arange(max(0, columns - self.real.shape[1]), device=self.real.device)
        positions = torch.cat([self.real.cumsum(1) - 1, self.real.sum(1, keepdim=True) + grown], 1)[:, :columns]
        for index in rows.cache.filled:
            layer = _layer(cache, index)
            first = max(0, columns - layer.sliding_window + 1) if isinstance(layer, DynamicSlidingWindowLayer) else 0
            indexed = rows.cache.take_indexed(index, positions[:, first:])
            keys, values = rows.cache.take(index, positions[:, first:])
            if hidden is not None:
                hidden.restore(index, keys, values, indexed)
            fill_attention_layer(layer, keys, values, columns)
            if indexed is not None:
                layer.lazy_initialization_indexer(indexed)
                layer.indexer_keys = indexed
                layer.indexer_position_ids = rows.cache.take_positions(columns)
        if columns != self.cached:  # otherwise the call failed, and the cache's states are unchanged
            extra = columns - self.real.shape[1]  # rows may have grown past the end of the text
            rows.cache.states.settle([length + extra for length in self.real.sum(1).tolist()])
            for (index, which), (window, memory) in rows.cache.states.held.items():
                fill_recurrent_layer(cache.layers[index], which, window, memory)


def prompt_layout(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> PromptLayout:
    """Make the layout of a prepared call that has no `problem`."""
    cache = cache_in(model_kwargs)
    wanted = config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    kept = (cache if type(cache) is DynamicCache else DynamicCache(config=model.config)) if wanted else None
    return PromptLayout(real_columns(input_ids, config, model_kwargs), columns_in(cache), input_ids.shape[1], kept)


def problem(
    input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any], windows: bool, states: bool
) -> str | None:
    """Return the reason why decoding cannot continue from a call's cache and mask, or None.

    Args:
        input_ids: (B, T) int64.
        config: the generation config.
        model_kwargs: arguments for the model.
        windows: True if the model has sliding windows.
        states: True if its layers have recurrent states.
    """
    cache = cache_in(model_kwargs)
    real = real_columns(input_ids, config, model_kwargs)
    if windows and not left_padded(real):
        return "attention_mask has holes inside a prompt, which count in this model's sliding windows"
    new = real[:, columns_in(cache) :]
    if states and not left_padded(new):
        return "attention_mask has holes inside a prompt, which would enter this model's recurrent states"
    if states and columns_in(cache) and not bool(new.all()):
        return "the new tokens have padding before them, which would enter this model's recurrent states"
    if cache is None or not (getattr(cache, "_is_user_defined", False) or columns_in(cache)):
        return None
    if isinstance(cache, EncoderDecoderCache):
        return f"{CACHE} of an encoder-decoder model holds earlier tokens"
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded cache" if type(cache) is DynamicCache else f"a {type(cache).__name__}"
        return f"{CACHE} is {kind}; only a DynamicCache can be continued"
    for layer in cache.layers:
        if type(layer) not in CONTINUABLE_LAYERS:
            return f"{CACHE} holds more than keys and values ({type(layer).__name__})"
        if getattr(layer, "record_past", False):
            return f"{CACHE} also records tokens outside of its sliding windows"
        if getattr(layer, "keys", None) is not None and layer.keys.dim() == 4 and len(layer.keys) != len(input_ids):
            return f"{CACHE} has {len(layer.keys)} rows, input_ids {len(input_ids)}"
    have, columns = columns_in(cache), real.shape[1]
    if have and not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        return f"{CACHE} holds recurrent states only, from which the number of tokens cannot be read"
    if have >= columns:
        crop = (
            f", or, if these tokens begin the text that the cache holds, {CACHE}.crop(-{have - columns + 1}). After an "
            "edit crop it to the tokens that both texts begin with, as specdec.Chat does"
        )
        return (
            f"{CACHE} holds {have} tokens, but the text has only {columns}: no new token is left to read. Pass the "
            f"whole conversation as input_ids{'' if states else crop}"
        )
    if columns not in (input_ids.shape[1], have + input_ids.shape[1]) and "inputs_embeds" not in model_kwargs:
        return (
            f"attention_mask has {columns} columns, {CACHE} {have} and input_ids {input_ids.shape[1]}: pass the whole "
            "conversation as input_ids, or the new tokens with an attention_mask over cached and new tokens"
        )
    return None


def real_columns(input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Tensor:
    """Return (B, C) bool on the host, True for text columns; C covers the cached and the new columns."""
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    if mask is not None:
        return mask.bool().cpu()
    width = input_ids.shape[1] if embeds is None else embeds.shape[1]
    return torch.ones(len(input_ids), max(width, mask_width(config)), dtype=torch.bool, device="cpu")


def columns_in(cache: Any) -> int:
    """Number of columns in a cache; 1 if it is not empty but has no length."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except Exception:  # a cache without attention keys has no length
        return int(not _untouched(cache))


def _untouched(cache: Any) -> bool:
    """Return True if the cache has only layers for recurrent states, all of them empty."""
    layers = getattr(cache, "layers", None) or [None]
    return all(
        isinstance(layer, LinearAttentionLayer) and not any(layer.has_previous_state.values()) for layer in layers
    )


def left_padded(real: Tensor) -> bool:
    """Return True if all padding of `real` (B, C) is on the left."""
    return not bool((real[:, 1:].int() < real[:, :-1].int()).any())


def _padding_first(real: Tensor) -> Tensor:
    """Columns (B, T) int64 of each row, padding first."""
    return real.int().argsort(dim=1, stable=True)


def _layer(cache: DynamicCache, index: int) -> Any:
    while len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index]
