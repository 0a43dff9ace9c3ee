"""Gated activation in one kernel: `gated`, the activation of one tensor times another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from specdec.models.kernels.launch import interpreted, launch

SILU, GELU_TANH = 0, 1
BLOCK = 1024
# CUDA's own functions, which torch uses. Triton's `exp` is less exact; its interpreter has no other.
EXACT = tl.constexpr(not interpreted())


def gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """Return activation(gate) * up, rounded after each of the two.

    Args:
        gate: any shape.
        up: the same shape and dtype.
        activation: SILU or GELU_TANH.

    Example:
        ```python
        states = mlp.down_proj(gated(mlp.gate_proj(states), mlp.up_proj(states), SILU))
        ```
    """
    gate, up = gate.contiguous(), up.contiguous()
    out, count = torch.empty_like(gate), gate.numel()
    launch(_kernel, (triton.cdiv(count, BLOCK),), gate, up, out, count, BLOCK=BLOCK, ACTIVATION=activation, warps=4)
    return out


@triton.jit
def _exp(x):
    if EXACT:
        return libdevice.exp(x)
    else:  # noqa: RET505 - only one of the branches is compiled
        return tl.exp(x)


@triton.jit
def _tanh(x):
    if EXACT:
        return libdevice.tanh(x)
    else:  # noqa: RET505
        return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of float32 values."""
    if ACTIVATION == 0:
        y = tl.div_rn(x, 1.0 + _exp(-x))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
        y = 0.5 * x * (1.0 + _tanh(inner))
    return y


@triton.jit
def _kernel(gate, up, out, count, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    dtype = gate.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    y = activated(x, ACTIVATION)
    y = y.to(dtype).to(tl.float32) * tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(dtype), mask=mask)
