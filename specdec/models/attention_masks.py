"""Attention masks in the forms that models take them, and how far back each layer attends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.models.cache.buffers import Span
from specdec.models.introspection import CHUNKED, FULL, RECURRENT, SLIDING, layer_kinds

MASKED = 2**25  # entries of a mask at most, in the passes over known tokens (sdpa may make it float32: 128 MiB)
FEWEST = 256  # known tokens per row and pass, from which on more of them at once are not read any faster


def masks_as_taken(model: PreTrainedModel, masks: str, seen: Callable[[Span], Tensor]) -> Any:
    """A model's `attention_mask`.

    Args:
        masks: how it takes them, see `ModelRunner`. seen: of layers that look so far back, what tokens see: (B, n, S)
            bool.
    """
    config = model.config.get_text_config(decoder=True)

    def mask(span: Span) -> Tensor:
        visible = seen(span)[:, None]
        if config._attn_implementation == "sdpa":
            return visible
        # eager adds the mask to the scores: a boolean one would be silently wrong.
        added = torch.zeros(visible.shape, dtype=model.dtype, device=visible.device)
        return added.masked_fill(~visible, torch.finfo(model.dtype).min)

    if masks == "tensor":
        return mask(spans(model, masks)[0])
    kinds = set(layer_kinds(config)) - set(RECURRENT)
    return dict.fromkeys(RECURRENT) | {kind: mask(_span(config, kind)) for kind in kinds}


def known_at_once(batch_size: int, length: int) -> int:
    """How many known tokens per row one pass is run over that needs a mask, in texts of this length."""
    return max(FEWEST, MASKED // (batch_size * length))


def default_masks(model: PreTrainedModel) -> str:
    """How the model most likely takes masks; `capability.probe` finds out for sure."""
    kinds = set(layer_kinds(model.config.get_text_config(decoder=True)))
    attending = kinds - set(RECURRENT)
    return "dict" if attending and attending <= {FULL, SLIDING, CHUNKED} else "tensor"


def _uniform_layer_type(config: Any) -> str:
    """The one kind of attention of a model without layer types (as masking_utils.create_masks_for_generate)."""
    types = set(getattr(config, "layer_types", None) or ())
    if len(types) == 1:
        return next(iter(types))
    if getattr(config, "sliding_window", None) is not None:
        return SLIDING
    return CHUNKED if getattr(config, "attention_chunk_size", None) is not None else FULL


def _span(config: Any, layer_type: str) -> Span:
    if layer_type == SLIDING:
        return Span(config.sliding_window)
    return Span(config.attention_chunk_size, chunked=True) if layer_type == CHUNKED else Span()


def spans(model: PreTrainedModel, masks: str) -> list[Span]:
    """How far back each layer looks. A model that makes its own masks counts on all keys being there, in order."""
    config = model.config.get_text_config(decoder=True)
    if masks == "own":
        return [Span()]
    if masks == "tensor":
        return [_span(config, _uniform_layer_type(config))]
    return [_span(config, kind) for kind in layer_kinds(config)]
