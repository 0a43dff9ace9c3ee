"""`PromptLayout`: what a call starts from, text whose keys and values are cached already and text that is new.

Owns the way between `generate()`'s columns, in which a `DynamicCache` lies, and rows, in which ours does: a row is its
columns without those the attention mask rules out, on the left or between two turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
class PromptLayout:
    """B rows of C columns, of which the first `cached` are in `cache` and the others are still to be read.

    Attributes:
        real: (B, C) bool, on the host, columns that hold text; the others are padding.
        cached: how many columns the cache holds.
        text: how many of the columns `input_ids` holds, the last ones: all, unless only new ones were given.
        cache: extended in place when the call ends; None where nobody is going to see it.
    """

    real: Tensor
    cached: int
    text: int
    cache: DynamicCache | None = None

    @property
    def fresh(self) -> list[int]:
        """Tokens of each row that are still to be read."""
        return self.real[:, self.cached :].sum(1).tolist()

    @property
    def pads(self) -> Tensor | None:
        """(B, 1) int64, columns of padding before each row's text; None where there are none."""
        pads = self.real.int().argmax(1, keepdim=True)
        return pads if bool(pads.any()) else None

    @property
    def text_pads(self) -> list[int]:
        """Columns of each row of `input_ids` that are padding."""
        return (~self._text).sum(1).tolist()

    @cached_property
    def text_order(self) -> Tensor | None:
        """(B, T) int64, the columns of `input_ids` with all padding first; None where they lie so."""
        return None if left_padded(self._text) else _padding_first(self._text)

    @property
    def _text(self) -> Tensor:
        return self.real[:, self.real.shape[1] - self.text :]

    def unread(self, given: Tensor) -> tuple[Tensor, list[int]]:
        """What is to be read of `given`, (B, <= C) ids or (B, C, H) embeddings: (B, W, ...), its padding first, and how
        much padding each row has; columns that are padding in every row are left out."""
        real = self.real[:, self.cached :]
        pads = (~real).sum(1).tolist()
        order = _padding_first(real)[:, min(pads) :].to(given.device)
        given = given[:, given.shape[1] - real.shape[1] :]
        shape = (*order.shape, *given.shape[2:])
        index = order.reshape(*order.shape, *[1] * (given.dim() - 2)).expand(shape)
        return given.gather(1, index), [pad - min(pads) for pad in pads]

    def as_given(self, states: Tensor) -> Tensor:
        """(B, W, H) states of what `unread` gave, as columns; zeros where all rows have padding."""
        real = self.real[:, self.cached :]
        states = torch.nn.functional.pad(states, (0, 0, real.shape[1] - states.shape[1], 0))
        back = _padding_first(real).argsort(1).to(states.device)
        return states.gather(1, back[..., None].expand_as(states))

    @contextmanager
    def in_rows(self, rows: CachedRows) -> Iterator[list[int]]:
        """Within this context the cache's keys, values and states are the rows'; then they are the cache's again.

        Yields a list to which the caller appends the number of columns to give back. Without one, if the call failed,
        the cache is as it was, or where windows slide and what was there is gone, empty.
        """
        cache = self.cache
        columns: list[int] = []
        rows.start(len(self.real), keeps_all=self._keeps_all)
        try:
            if self.cached:
                self._hand_over(rows)
            yield columns
        finally:
            if cache is not None:
                self._give_back(rows, cache, columns[0] if columns else self.cached)
                if not columns and any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers):
                    for layer in cache.layers:
                        fill_attention_layer(layer, None, None, 0)
                        if hasattr(layer, "has_previous_state"):
                            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, False)

    @property
    def _keeps_all(self) -> bool:
        """A cache of the user's that knows of no windows keeps everything, and is given back so."""
        user_defined = getattr(self.cache, "_is_user_defined", False)
        return user_defined and not any(isinstance(layer, DynamicSlidingWindowLayer) for layer in self.cache.layers)

    def _hand_over(self, rows: CachedRows) -> None:
        assert self.cache is not None
        real = self.real[:, : self.cached]
        rows.cache.lengths = real.sum(1).tolist()
        columns = (~real).int().argsort(dim=1, stable=True)  # (B, cached) where each row's tokens are, in order
        for index, layer in enumerate(self.cache.layers):
            for which in range(getattr(layer, "number_of_states", 0)):
                states = layer.conv_states[which], layer.recurrent_states[which]
                rows.cache.states.put((index, which), *states, rows.cache.lengths)
            if getattr(layer, "keys", None) is not None:
                keys, values = layer.keys, layer.values
                indexed = getattr(layer, "indexer_keys", None)
                if getattr(layer, "indexer_position_ids", None) is not None:
                    rows.cache.indexer_position_ids = layer.indexer_position_ids
                rows.cache.put(index, keys, values, columns - (self.cached - keys.shape[2]), indexed)
                layer.keys = layer.values = None

    def _give_back(self, rows: CachedRows, cache: DynamicCache, columns: int) -> None:
        grown = torch.arange(max(0, columns - self.real.shape[1]))
        positions = torch.cat([self.real.cumsum(1) - 1, self.real.sum(1, keepdim=True) + grown], 1)[:, :columns]
        for index in rows.cache.filled:
            layer = _layer(cache, index)
            first = max(0, columns - layer.sliding_window + 1) if isinstance(layer, DynamicSlidingWindowLayer) else 0
            indexed = rows.cache.take_indexed(index, positions[:, first:])
            fill_attention_layer(layer, *rows.cache.take(index, positions[:, first:]), columns)
            if indexed is not None:
                layer.lazy_initialization_indexer(indexed)
                layer.indexer_keys = indexed
                layer.indexer_position_ids = rows.cache.take_positions(columns)
        if columns != self.cached:  # else the call failed, and the cache's states are as they were
            behind = columns - self.real.shape[1]  # rows may have run ahead of where the text ended
            rows.cache.states.settle([length + behind for length in self.real.sum(1).tolist()])
            for (index, which), (window, memory) in rows.cache.states.held.items():
                fill_recurrent_layer(cache.layers[index], which, window, memory)


def prompt_layout(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> PromptLayout:
    """Of a call as transformers prepared it, in which there is no `problem`."""
    cache = cache_in(model_kwargs)
    wanted = config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    kept = (cache if type(cache) is DynamicCache else DynamicCache(config=model.config)) if wanted else None
    return PromptLayout(real_columns(input_ids, config, model_kwargs), columns_in(cache), input_ids.shape[1], kept)


def problem(
    input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any], windows: bool, states: bool
) -> str | None:
    """Why the cache or mask of a call is not one to go on from, or None.

    windows: the model has sliding ones. states: its layers carry more than keys and values.
    """
    cache = cache_in(model_kwargs)
    real = real_columns(input_ids, config, model_kwargs)
    if windows and not left_padded(real):
        return "attention_mask has holes inside a prompt, which count in this model's sliding windows"
    new = real[:, columns_in(cache) :]
    if states and not left_padded(new):
        return "attention_mask has holes inside a prompt, over which this model's states go on"
    if states and columns_in(cache) and not bool(new.all()):
        return "what is new has padding before it, over which this model's states go on"
    if cache is None or not (getattr(cache, "_is_user_defined", False) or columns_in(cache)):
        return None
    if isinstance(cache, EncoderDecoderCache):
        return f"{CACHE} of an encoder-decoder model hold earlier tokens"
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded cache" if type(cache) is DynamicCache else f"a {type(cache).__name__}"
        return f"{CACHE} is {kind}; a DynamicCache could be continued"
    for layer in cache.layers:
        if type(layer) not in CONTINUABLE_LAYERS:
            return f"{CACHE} holds more than keys and values ({type(layer).__name__})"
        if getattr(layer, "record_past", False):
            return f"{CACHE} records what slid out of its windows"
        if getattr(layer, "keys", None) is not None and layer.keys.dim() == 4 and len(layer.keys) != len(input_ids):
            return f"{CACHE} has {len(layer.keys)} rows, input_ids {len(input_ids)}"
    have, columns = columns_in(cache), real.shape[1]
    if have and not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        return f"{CACHE} holds recurrent states alone, which do not say of how many tokens they are"
    if have >= columns:
        crop = f", or crop the cache: {CACHE}.crop(-{have - columns + 1})"
        return (
            f"{CACHE} holds {have} tokens and the text no more than {columns}: nothing is left to read. Give "
            f"the whole conversation as input_ids{'' if states else crop}"
        )
    if columns not in (input_ids.shape[1], have + input_ids.shape[1]) and "inputs_embeds" not in model_kwargs:
        return (
            f"attention_mask has {columns} columns, {CACHE} {have} and input_ids {input_ids.shape[1]}: give "
            "the whole conversation as input_ids, or the new tokens with the attention_mask of both"
        )
    return None


def real_columns(input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Tensor:
    """(B, C) bool, which columns are text; C is the attention mask's, which covers the cache and all that is new."""
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    if mask is not None:
        return mask.bool().cpu()
    width = input_ids.shape[1] if embeds is None else embeds.shape[1]
    return torch.ones(len(input_ids), max(width, mask_width(config)), dtype=torch.bool)


def columns_in(cache: Any) -> int:
    """Columns in a cache; 1 where it holds something and cannot say."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except Exception:  # a cache that cannot say how long it is is not one of attention keys
        return int(not _untouched(cache))


def _untouched(cache: Any) -> bool:
    """It holds nothing yet but layers for states."""
    layers = getattr(cache, "layers", None) or [None]
    return all(
        isinstance(layer, LinearAttentionLayer) and not any(layer.has_previous_state.values()) for layer in layers
    )


def left_padded(real: Tensor) -> bool:
    return not bool((real[:, 1:].int() < real[:, :-1].int()).any())


def _padding_first(real: Tensor) -> Tensor:
    """(B, T) int64, the columns of each row, those of padding first."""
    return real.int().argsort(dim=1, stable=True)


def _layer(cache: DynamicCache, index: int) -> Any:
    while len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index]
