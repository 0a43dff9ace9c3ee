"""Lengths of a text from which a model computes in another way than before, so that drafts are not plain decoding's."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specdec.engine.hf import prompt_layout
from specdec.models.attention_masks import known_at_once
from specdec.models.compat import cache_in


def rope_problem(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """Return the reason if the text may cross a length at which RoPE's frequencies change, or None.

    These frequencies depend on the largest position of a pass (modeling_rope_utils.py, 5.17 to 5.24). Beyond the limit
    "longrope" uses one other set, and "dynamic" another set at every length. When a text crosses the limit, the
    frequencies of its keys depend on how it was split into passes, and some models read the whole text again.
    """
    limit, steady = _rope_limit(model.config.get_text_config(decoder=True))
    if limit is None:
        return None
    real = prompt_layout.real_columns(input_ids, config, model_kwargs)
    longest, new = int(real.sum(-1).max()), config.max_length - input_ids.shape[1]
    if longest + new <= limit:
        return None
    in_one_pass = config.prefill_chunk_size is None and (bool(real.all()) or longest <= known_at_once(*real.shape))
    if steady and longest > limit and in_one_pass and not prompt_layout.columns_in(cache_in(model_kwargs)):
        return None
    return (
        f"the text may grow from {longest} to {longest + new} tokens, and the model's RoPE changes its frequencies "
        f"after {limit}"
    )


def scale_problem(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """Return the reason if the text may reach the length from which a model scales its queries by column, or None.

    Llama 4 does so in layers without rotary embeddings. A draft's nodes are not in the columns of their tokens.
    """
    text = model.config.get_text_config(decoder=True)
    start = getattr(text, "floor_scale", None)
    if start is None or not getattr(text, "attn_temperature_tuning", False):
        return None
    columns = prompt_layout.real_columns(input_ids, config, model_kwargs).shape[1]
    longest = columns + config.max_length - input_ids.shape[1]
    if longest < start:
        return None
    return f"the text may grow to {longest} tokens, and the model scales its queries by their column from {start} on"


def _rope_limit(config: Any) -> tuple[int | None, bool]:
    """Length after which RoPE's frequencies change (None if never), and True if they change only there."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in parameters.values() if isinstance(kind, dict)] or [parameters]  # one per layer type
    found: list[tuple[int, bool]] = []
    for kind in kinds:
        name = kind.get("rope_type") or "default"
        if name == "longrope":
            found.append((kind["original_max_position_embeddings"], True))
        elif "dynamic" in name:
            found.append((config.max_position_embeddings, False))
    if not found:
        return None, True
    return min(found)[0], len(set(found)) == 1 and found[0][1]
