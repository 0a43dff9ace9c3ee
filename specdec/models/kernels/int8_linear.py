"""`int8_linear`: a linear layer with 8-bit weights over at most 16 rows, as Triton kernels for GPUs.

Decoding is bound by reading weights, and int8 weights are half of bfloat16's bytes. A program reads the weights of a
few outputs in rows of consecutive bytes, and multiplies them in the precision of the inputs with float32 sums. One row
is multiplied without tensor cores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # rows of x at most: the smallest matrix of a tensor core


class Tiles(NamedTuple):
    """Tile sizes and launch options of a kernel.

    Attributes:
        outputs: outputs per program, a power of two; at least 16 for several rows.
        inputs: inputs per step, a power of two of at least 16.
        warps: warps per program.
        stages: steps whose loads are in flight.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int


# The fastest on an H100 (benchmarks/regression/int8_kernel.py)
ONE_ROW = Tiles(outputs=8, inputs=1024, warps=4, stages=3)
SEVERAL_ROWS = Tiles(outputs=32, inputs=256, warps=4, stages=5)
SEVERAL_ROWS_WIDE = Tiles(outputs=64, inputs=128, warps=4, stages=5)
WIDE = 8192  # outputs


def int8_linear(
    x: Tensor, weights: Tensor, scale: Tensor, bias: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Multiply rows by int8 weights with one scale per output.

    Args:
        x: (M, in) float16, bfloat16 or float32, M at most 16.
        weights: (out, in) int8, contiguous.
        scale: (out,) float; weight (o, i) is weights[o, i] * scale[o].
        bias: (out,) float; None for none.
        tiles: tile sizes; None for those that suit the number of rows.

    Returns:
        (M, out), in the dtype of x.

    Example:
        ```python
        from specdec.models.kernels.int8_linear import int8_linear

        result = int8_linear(x, layer.quantized, layer.scale)  # x @ (quantized * scale[:, None]).T
        ```
    """
    (M, K), N = x.shape, weights.shape[0]
    assert M <= ROWS
    x, out = x.contiguous(), torch.empty(M, N, dtype=x.dtype, device=x.device)
    tiles = tiles or (ONE_ROW if M == 1 else SEVERAL_ROWS_WIDE if N >= WIDE else SEVERAL_ROWS)
    given = (x, weights, scale, scale if bias is None else bias, out)
    options = {
        "K": K,
        "HAS_BIAS": bias is not None,
        "OUTPUTS": tiles.outputs,
        "INPUTS": tiles.inputs,
        "num_warps": tiles.warps,
    }
    grid = (triton.cdiv(N, tiles.outputs),)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if M == 1:
            _one_row[grid](*given, N, STAGES=tiles.stages, **options)
        else:
            _several_rows[grid](*given, M, N, ROWS=ROWS, num_stages=tiles.stages, **options)
    return out


@triton.jit
def _one_row(
    x,
    weights,
    scale,
    bias,
    out,
    N,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    outputs, inputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    weights += (outputs % N).to(tl.int64)[:, None] * K + inputs[None, :]
    total = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    for start in tl.range(0, K, INPUTS, num_stages=STAGES):
        if K % INPUTS == 0:
            given, read = tl.load(x + start + inputs), tl.load(weights + start)
        else:
            inside = start + inputs < K
            given = tl.load(x + start + inputs, mask=inside, other=0.0)
            read = tl.load(weights + start, mask=inside[None, :], other=0)
        total += read.to(tl.float32) * given.to(tl.float32)[None, :]
    result = tl.sum(total, 1) * tl.load(scale + outputs % N).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + outputs % N).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=outputs < N)


@triton.jit(do_not_specialize=["M"])
def _several_rows(
    x,
    weights,
    scale,
    bias,
    out,
    M,
    N,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    outputs, inputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    rows = tl.arange(0, ROWS)
    weights += (outputs % N).to(tl.int64)[None, :] * K + inputs[:, None]
    x += rows[:, None] * K + inputs[None, :]
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, K, INPUTS):
        if K % INPUTS == 0:
            given, read = tl.load(x + start, mask=rows[:, None] < M, other=0.0), tl.load(weights + start)
        else:
            inside = start + inputs < K
            given = tl.load(x + start, mask=(rows[:, None] < M) & inside[None, :], other=0.0)
            read = tl.load(weights + start, mask=inside[:, None], other=0)
        total = tl.dot(given, read.to(given.dtype), total)
    result = total * tl.load(scale + outputs % N).to(tl.float32)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + outputs % N).to(tl.float32)[None, :]
    at = out + rows[:, None] * N + outputs[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (outputs[None, :] < N))
