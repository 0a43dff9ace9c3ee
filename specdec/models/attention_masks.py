"""Attention masks in the formats that models take, and the attention span of each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.models.cache.buffers import Span
from specdec.models.introspection import CHUNKED, FULL, RECURRENT, SLIDING, layer_kinds

MASKED = 2**25  # maximum entries of a mask in a pass over known tokens (sdpa may convert it to float32: 128 MiB)
FEWEST = 256  # minimum known tokens per row and pass: reading more at once is not faster


def masks_as_taken(model: PreTrainedModel, masks: str, seen: Callable[[Span], Tensor]) -> Any:
    """Build a model's `attention_mask`.

    Args:
        model: the model.
        masks: its mask format, see `ModelRunner`.
        seen: returns the slots (B, n, S) bool that tokens see in layers of a given span.
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
    """Number of known tokens per row to run in one pass that needs a mask, for texts of this length."""
    return max(FEWEST, MASKED // (batch_size * length))


def default_masks(model: PreTrainedModel) -> str:
    """Guess the model's mask format from its layer types; `capability.probe` verifies it."""
    kinds = set(layer_kinds(model.config.get_text_config(decoder=True)))
    attending = kinds - set(RECURRENT)
    return "dict" if attending and attending <= {FULL, SLIDING, CHUNKED} else "tensor"


def _uniform_layer_type(config: Any) -> str:
    """Attention kind of a model with a single one, found as in masking_utils.create_masks_for_generate."""
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
    """Attention span of each layer. A model that builds its own masks needs all keys, in order."""
    config = model.config.get_text_config(decoder=True)
    if masks == "own":
        return [Span()]
    if masks == "tensor":
        return [_span(config, _uniform_layer_type(config))]
    return [_span(config, kind) for kind in layer_kinds(config)]
