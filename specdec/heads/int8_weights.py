"""Conversion of a head's matrices to and from 8 bits: int8 values with a float32 scale per row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

SCALE = "_scale"  # suffix: the scales of "fc.weight" are "fc.weight_scale"


def to_int8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert matrices (rows, n) to int8, and add scales (rows, 1) for each. Other tensors stay as they are."""
    out = dict(weights)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            out |= {name: (tensor.float() / scale).round().to(torch.int8), name + SCALE: scale}
    return out


def from_int8(tensors: Mapping[str, Tensor], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Invert `to_int8`. Returns all tensors, the int8 matrices as bfloat16, and the scales by name."""
    out, scales = dict(tensors), {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            if name + SCALE not in tensors:
                raise ValueError(f"{folder}: {name} has dtype int8, but its scales ({name + SCALE}) are missing")
            scale = scales[name + SCALE] = out.pop(name + SCALE)
            if tuple(scale.shape) != (tensor.shape[0], 1):
                raise ValueError(f"{folder}: {name + SCALE} has shape {tuple(scale.shape)}, expected one scale per row")
            out[name] = (tensor.float() * scale.float()).to(torch.bfloat16)
    return out, scales
