"""RMSNorm in one kernel, with the sum around it: `normalized`, and `added` before or after a norm.

Rounds as the norms of transformers do. Only the order in which squares are summed differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.models.kernels.launch import WARPS, fits, launch, power_of_two

NONE, LLAMA, GEMMA, LATE = 0, 1, 2, 3  # roundings, see `Norm`


@dataclass(frozen=True)
class Norm:
    """An RMSNorm over the last dimension.

    Args:
        weight: (H,).
        eps: added to the mean square.
        rounding: where the float32 result is rounded. LLAMA: before it is multiplied by the weight. LATE: after that.
            GEMMA: after it is multiplied by 1 + weight.
    """

    weight: Tensor
    eps: float
    rounding: int = LLAMA


def normalized(x: Tensor, norm: Norm) -> Tensor:
    """Return the norm of x (..., H).

    Example:
        ```python
        states = normalized(states, Norm(layer.weight, layer.variance_epsilon))
        ```
    """
    size = x.shape[-1]
    rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launched(rows, None, None, out.view(-1, size), None, norm)
    return out


def added(update: Tensor, residual: Tensor, inner: Norm | None, outer: Norm | None) -> tuple[Tensor, Tensor | None]:
    """Return the sum of `residual` and `update`, and the norm of the sum.

    Args:
        update: (..., H), output of attention or of an MLP.
        residual: (..., H).
        inner: norm of the update before it is added; None for none.
        outer: norm of the sum; None if it is not wanted.

    Example:
        ```python
        states, normed = added(attended, states, None, Norm(layer.weight, layer.variance_epsilon))
        ```
    """
    size = update.shape[-1]
    total = torch.empty(residual.shape, dtype=update.dtype, device=update.device)
    out = None if outer is None else torch.empty_like(total)
    flat = None if out is None else out.view(-1, size)
    _launched(_rows(update), _rows(residual), total.view(-1, size), flat, inner, outer)
    return total, out


def takes(x: Tensor, *norms: Norm | None) -> bool:
    """Return whether the kernel takes x (..., H) and these norms, see `fits`."""
    weights = [norm.weight for norm in norms if norm is not None]
    return fits(x, *weights) and all(weight.shape == x.shape[-1:] for weight in weights)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launched(
    x: Tensor, residual: Tensor | None, total: Tensor | None, out: Tensor | None, inner: Norm | None, outer: Norm | None
) -> None:
    count, size = x.shape
    block = power_of_two(size)
    launch(
        _kernel,
        (count,),
        x,
        residual,
        total,
        out,
        None if inner is None else inner.weight,
        None if outer is None else outer.weight,
        0.0 if inner is None else inner.eps,
        0.0 if outer is None else outer.eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        SIZE=size,
        BLOCK=block,
        INNER=NONE if inner is None else inner.rounding,
        ADD=residual is not None,
        OUTER=NONE if outer is None else outer.rounding,
        warps=min(WARPS, max(1, block // 512)),
    )


@triton.jit
def rms_scale(square_sum, eps, SIZE: tl.constexpr):
    """Factor that normalizes `SIZE` values with this sum of squares."""
    return tl.rsqrt(square_sum * (1.0 / SIZE) + eps)


@triton.jit
def weighted(x, weight, dtype: tl.constexpr, ROUNDING: tl.constexpr):
    """Normalized values, float32, times the norm's weight; rounded to `dtype`, but again float32."""
    w = weight.to(tl.float32)
    if ROUNDING == 1:
        x = x.to(dtype).to(tl.float32)
    if ROUNDING == 2:
        w = w + 1.0
    return (x * w).to(dtype).to(tl.float32)


@triton.jit
def _kernel(
    x,
    residual,
    total,
    out,
    inner,
    outer,
    inner_eps,
    outer_eps,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
    ADD: tl.constexpr,
    OUTER: tl.constexpr,
):
    dtype = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if INNER != 0:
        scale = rms_scale(tl.sum(value * value, 0), inner_eps, SIZE)
        value = weighted(value * scale, tl.load(inner + columns, mask=mask, other=0.0), dtype, INNER)
    if ADD:
        value += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
        tl.store(total + row * SIZE + columns, value.to(dtype), mask=mask)
    if OUTER != 0:
        scale = rms_scale(tl.sum(value * value, 0), outer_eps, SIZE)
        value = weighted(value * scale, tl.load(outer + columns, mask=mask, other=0.0), dtype, OUTER)
        tl.store(out + row * SIZE + columns, value.to(dtype), mask=mask)
