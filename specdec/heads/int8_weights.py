"""Matrices of a head as they are kept in 8 bits: int8, and a float32 scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

SCALE = "_scale"  # behind the name of a matrix of int8


def as_int8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices (rows, n) as int8, each beside its scales (rows, 1)."""
    out = dict(weights)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            out |= {name: (tensor.float() / scale).round().to(torch.int8), name + SCALE: scale}
    return out


def of_int8(tensors: Mapping[str, Tensor], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `as_int8` made, in bfloat16; and the scales."""
    out, scales = dict(tensors), {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            if name + SCALE not in tensors:
                raise ValueError(f"{folder}: {name} is of int8, and its scales ({name + SCALE}) are not there")
            scale = scales[name + SCALE] = out.pop(name + SCALE)
            if tuple(scale.shape) != (tensor.shape[0], 1):
                raise ValueError(f"{folder}: {name + SCALE} has shape {tuple(scale.shape)}, not a scale for each row")
            out[name] = (tensor.float() * scale.float()).to(torch.bfloat16)
    return out, scales
