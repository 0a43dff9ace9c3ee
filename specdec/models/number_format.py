"""Conversion of a model's weights to another number format, as `from_pretrained(dtype=...)` loads them."""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def convert(model: M, dtype: torch.dtype) -> M:
    """Convert the weights of a model in place, and return it.

    `model.to(dtype)` would also round what is no weight, such as the frequencies of rotary embeddings, even if the
    weights have that format already. Weights that transformers loads in float32 are in float32 afterwards. Quantised
    models stay as they are.

    Args:
        model: model from transformers, or modules of one.
        dtype: a floating-point format.

    Example:
        ```python
        model = convert(AutoModelForCausalLM.from_pretrained(path, dtype="auto"), torch.bfloat16)
        ```
    """
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "dtype", None) == dtype:
        return model
    exact = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        exact |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in sorted(exact)) or "$^")
    wanted = _formats_of_buffers(model, dtype)
    wanted |= {name: torch.float32 if kept.search(name) else dtype for name in model.state_dict()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and name in wanted:
            tensor.data = tensor.data.to(wanted[name])
    return model


def _formats_of_buffers(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Formats of the buffers of such a model if it is made in a format. Empty if it cannot be made."""
    with suppress(Exception), torch.device("meta"):
        if isinstance(model, PreTrainedModel):
            made = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
            return {name: buffer.dtype for name, buffer in made.named_buffers()}
    return {}
