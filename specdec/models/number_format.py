"""Conversion of a model's weights to another number format, as `from_pretrained(dtype=...)` loads them."""

from __future__ import annotations

import re
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def convert(model: M, dtype: torch.dtype) -> M:
    """Convert the weights of a model in place, and return it.

    `model.to(dtype)` would also round what is no weight, such as the frequencies of rotary embeddings, even if the
    weights have that format already. Weights that transformers loads in float32 stay in float32. Quantised models stay
    as they are.

    Args:
        model: model from transformers, or modules of one.
        dtype: a floating-point format.

    Example:
        ```python
        model = convert(AutoModelForCausalLM.from_pretrained(path, dtype="auto"), torch.bfloat16)
        ```
    """
    if getattr(model, "hf_quantizer", None) is not None:
        return model
    exact = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        exact |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in sorted(exact)) or "$^")
    for name, weight in model.state_dict(keep_vars=True).items():
        if weight.is_floating_point() and not kept.search(name):
            weight.data = weight.data.to(dtype)
    return model
