"""Prompts with images, videos or audio for multimodal models.

Such a prompt is read once, in one pass, as in plain decoding. All tokens after it are text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from specdec.engine.hf.prompt_layout import PromptLayout, columns_in, left_padded, real_columns
from specdec.models.compat import CACHE, PREFILL_ONLY, cache_in
from specdec.models.introspection import marks_of
from specdec.models.output import Output
from specdec.models.runner import ModelRunner

# Positions and sizes of the media: `generate()` also passes these to later passes, where they have no effect.
PLACED = {
    *("token_type_ids", "mm_token_type_ids", "feature_attention_mask", "image_position_ids", "video_position_ids"),
    *("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "num_frames_per_video"),
}


def shown(model_kwargs: dict[str, Any]) -> set[str]:
    """Names of a call's multimodal arguments that carry data; empty for text only."""
    given = {
        name for name in (PREFILL_ONLY | PLACED) & model_kwargs.keys() if _says_something(name, model_kwargs[name])
    }
    return given if given & PREFILL_ONLY else set()


def problem(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """Return the reason why a multimodal call cannot be speculated on, or None."""
    if not any(bool(torch.any(input_ids == mark)) for mark in marks_of(model.config)):
        return "the prompt has no placeholder tokens for its images, videos or audio"
    if columns_in(cache_in(model_kwargs)):
        return f"images, videos or audio together with {CACHE}"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size for a prompt with images, videos or audio"
    if not left_padded(real_columns(input_ids, config, model_kwargs)):
        return "attention_mask has holes inside a prompt with images, videos or audio"
    if any(hasattr(module, "rope_deltas") for module in model.modules()) and not _in_planes(model_kwargs):
        return "position_ids lack the rows and columns of the images"
    return None


def multimodal_prefill(
    target: ModelRunner, input_ids: Tensor, layout: PromptLayout, model_kwargs: dict[str, Any]
) -> tuple[PromptLayout, Output]:
    """Run the target over the whole prompt with the model's own masks and positions.

    Args:
        target: runner of the target.
        input_ids: (B, T) int64.
        layout: layout of the prompt.
        model_kwargs: the call's arguments for the model.

    Returns:
        The layout to decode from, in which the prompt is cached like an earlier turn, and the output of the pass.
    """
    model = target.model
    cache = DynamicCache(config=model.config) if layout.cache is None else layout.cache
    given = {**model_kwargs, CACHE: cache, "return_dict": True}
    inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **given)
    output = target.read_multimodal(inputs)
    positions = inputs.get("position_ids")
    if positions is not None and positions.dim() == 3:
        ends = layout.real.sum(1).to(positions.device)
        target.shift_positions((positions[..., -1] + 1 - ends)[..., None])
    return replace(layout, cached=layout.real.shape[1], cache=cache), output


def _in_planes(model_kwargs: dict[str, Any]) -> bool:
    positions = model_kwargs.get("position_ids")
    return isinstance(positions, Tensor) and positions.dim() == 3


def _says_something(name: str, value: Any) -> bool:
    if name.endswith("type_ids"):  # 0 marks text tokens
        return isinstance(value, Tensor) and bool(value.any())
    return value is not None and not (isinstance(value, dict) and not value)
