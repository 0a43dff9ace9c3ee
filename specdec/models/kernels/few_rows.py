"""Products of few rows with the weights of one to three linear layers in one kernel, for GPUs.

`joined_linear` multiplies the same rows by several weights. `joined_gate` multiplies them by the gate and up weights of
an MLP and applies the activation. The weights stay where they are: a program finds its weight by its number. Decoding
is bound by reading weights, and a launch costs 2 to 4 microseconds in which the memory is not busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.models.kernels.activation import activated
from specdec.models.kernels.launch import fits, interpreted, launch

ROWS = 16  # rows of x per program: the smallest matrix of a tensor core
MOST = 3  # weights of a product
LINE = tl.constexpr(64)  # 16-bit weights in a line of the GPU's cache
LINES = tl.constexpr(16)  # lines of each output that are fetched early
FETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


class Tiles(NamedTuple):
    """Tile sizes and launch options of a kernel.

    Attributes:
        outputs: outputs of each weight per program, a power of two of at least 16.
        inputs: inputs per step, a power of two of at least 16.
        warps: warps per program.
        stages: steps whose loads are in flight.
        early: start before the kernel before has ended, and fetch the first weights meanwhile (Hopper and later).
    """

    outputs: int
    inputs: int
    warps: int
    stages: int
    early: bool = False


# Uses of the kernels, by the layers whose products they are
QKV, GATE, OUT, DOWN = "q, k, v", "gate, up", "o", "down"
# The fastest on an H100, and faster than torch's products there (benchmarks/regression/few_rows_kernel.py)
TILES = {
    QKV: Tiles(outputs=64, inputs=128, warps=4, stages=5),
    GATE: Tiles(outputs=64, inputs=128, warps=8, stages=4),
    OUT: Tiles(outputs=32, inputs=256, warps=4, stages=5),
    DOWN: Tiles(outputs=16, inputs=512, warps=2, stages=4),
}
IN_USE = frozenset(TILES)


def joined_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), tiles: Tiles = TILES[QKV]
) -> tuple[Tensor, ...]:
    """Multiply rows by the weights of one to three linear layers.

    Sums are float32 and rounded once. A row's bits depend on that row, the weights and the tiles alone.

    Args:
        x: (M, K). Each 16 rows read the weights again.
        weights: (N_i, K) each, contiguous, in the dtype of x.
        biases: (N_i,) each; empty for none.
        tiles: tile sizes.

    Returns:
        (M, N_i) for each weight, contiguous.

    Example:
        ```python
        query, key = joined_linear(x, [layer.q_proj.weight, layer.k_proj.weight])
        ```
    """
    (M, K), count = x.shape, len(weights)
    assert 1 <= count <= MOST
    sizes = [weight.shape[0] for weight in weights]
    x, out = x.contiguous(), torch.empty(M * sum(sizes), dtype=x.dtype, device=x.device)
    unused = MOST - count
    given = (*weights, *[weights[0]] * unused)
    launch(
        _linear,
        (sum(triton.cdiv(size, tiles.outputs) for size in sizes), triton.cdiv(M, ROWS)),
        x,
        *given,
        *((*biases, *[biases[0]] * unused) if biases else given),
        out,
        M,
        *sizes,
        *[0] * unused,
        K,
        HAS_BIAS=bool(biases),
        **_options(K, tiles),
    )
    starts = [M * sum(sizes[:index]) for index in range(count)]
    return tuple(out[start : start + M * size].view(M, size) for start, size in zip(starts, sizes, strict=True))


def joined_gate(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: int,
    biases: Sequence[Tensor] = (),
    tiles: Tiles = TILES[GATE],
) -> Tensor:
    """Return activation(x @ gate.T) * (x @ up.T), with the roundings of separate products and of `gated`.

    Args:
        x: (M, K), M at most 16.
        gate: (N, K), contiguous, in the dtype of x.
        up: the same shape and dtype.
        activation: as for `gated`.
        biases: (N,) of each; empty for none.
        tiles: tile sizes.

    Returns:
        (M, N).

    Example:
        ```python
        states = mlp.down_proj(joined_gate(x, mlp.gate_proj.weight, mlp.up_proj.weight, SILU))
        ```
    """
    (M, K), N = x.shape, gate.shape[0]
    assert M <= ROWS
    x, out = x.contiguous(), torch.empty(M, N, dtype=x.dtype, device=x.device)
    launch(
        _gate,
        (triton.cdiv(N, tiles.outputs),),
        x,
        gate,
        up,
        *(biases or (gate, up)),
        out,
        M,
        N,
        K,
        HAS_BIAS=bool(biases),
        ACTIVATION=activation,
        **_options(K, tiles),
    )
    return out


def _options(K: int, tiles: Tiles) -> dict[str, Any]:
    early = tiles.early and not interpreted()
    return {
        "EARLY": early,
        "EVEN": K % tiles.inputs == 0,
        "OUTPUTS": tiles.outputs,
        "INPUTS": tiles.inputs,
        "ROWS": ROWS,
        "warps": tiles.warps,
        "num_stages": tiles.stages,
        **({"launch_pdl": True} if early else {}),
    }


def takes(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), rows: int | None = ROWS) -> bool:
    """Return whether the kernels take x (..., K), of at most so many rows, and these weights and biases, see `fits`.

    float32 is left to torch, except in Triton's interpreter.
    """
    given = (*weights, *biases)
    return (
        (rows is None or x.numel() <= rows * x.shape[-1])
        and fits(x, *given)
        and (x.dtype != torch.float32 or interpreted())
        and all(tensor.is_contiguous() for tensor in given)
    )


@triton.jit
def _fetched(weight, row, K):
    """Bring the first weights of rows that start at `row` into the GPU's cache."""
    first = tl.minimum(tl.arange(0, LINES) * LINE, K - 1)
    at = (weight + row[:, None] + first[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(FETCH, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _given(x, start, row_mask, inside, EVEN: tl.constexpr):
    """The next inputs of the rows (ROWS, INPUTS)."""
    return tl.load(x + start, mask=row_mask if EVEN else row_mask & inside[None, :], other=0.0)


@triton.jit
def _read(weight, start, inside, EVEN: tl.constexpr):
    """The next inputs of a weight (INPUTS, OUTPUTS)."""
    if EVEN:
        read = tl.load(weight + start)
    else:
        read = tl.load(weight + start, mask=inside[:, None], other=0.0)
    return read


@triton.jit(do_not_specialize=["M"])
def _linear(
    x,
    weight_0,
    weight_1,
    weight_2,
    bias_0,
    bias_1,
    bias_2,
    out,
    M,
    N_0,
    N_1,
    N_2,
    K,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
    EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    block, weight, bias, N = tl.program_id(0), weight_0, bias_0, N_0
    first = tl.cdiv(N_0, OUTPUTS)
    second = first + tl.cdiv(N_1, OUTPUTS)
    if block >= second:
        block, weight, bias, N = block - second, weight_2, bias_2, N_2
        out += M * (N_0 + N_1)
    elif block >= first:
        block, weight, bias, N = block - first, weight_1, bias_1, N_1
        out += M * N_0
    rows, inputs = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, INPUTS)
    outputs = block * OUTPUTS + tl.arange(0, OUTPUTS)
    known = tl.minimum(outputs, N - 1)
    row_mask = rows[:, None] < M
    x += rows[:, None] * K + inputs[None, :]
    row = known.to(tl.int64) * K
    if EARLY:
        _fetched(weight, row, K)
        gdc_wait()
        gdc_launch_dependents()
    weight += row[None, :] + inputs[:, None]
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, K, INPUTS):
        inside = start + inputs < K
        given = _given(x, start, row_mask, inside, EVEN)
        total = tl.dot(given, _read(weight, start, inside, EVEN), total)
    if HAS_BIAS:
        total += tl.load(bias + known).to(tl.float32)[None, :]
    to = out + rows[:, None] * N + outputs[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=row_mask & (outputs[None, :] < N))


@triton.jit(do_not_specialize=["M"])
def _gate(
    x,
    gate,
    up,
    gate_bias,
    up_bias,
    out,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
    EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    dtype = out.dtype.element_ty
    rows, inputs = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = tl.minimum(outputs, N - 1)
    row_mask = rows[:, None] < M
    x += rows[:, None] * K + inputs[None, :]
    row = known.to(tl.int64) * K
    if EARLY:
        _fetched(gate, row, K)
        _fetched(up, row, K)
        gdc_wait()
        gdc_launch_dependents()
    at = row[None, :] + inputs[:, None]
    gates, ups = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32), tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, K, INPUTS):
        inside = start + inputs < K
        given = _given(x, start, row_mask, inside, EVEN)
        gates = tl.dot(given, _read(gate + at, start, inside, EVEN), gates)
        ups = tl.dot(given, _read(up + at, start, inside, EVEN), ups)
    if HAS_BIAS:
        gates += tl.load(gate_bias + known).to(tl.float32)[None, :]
        ups += tl.load(up_bias + known).to(tl.float32)[None, :]
    gates, ups = gates.to(dtype).to(tl.float32), ups.to(dtype).to(tl.float32)
    y = activated(gates, ACTIVATION).to(dtype).to(tl.float32) * ups
    tl.store(out + rows[:, None] * N + outputs[None, :], y.to(dtype), mask=row_mask & (outputs[None, :] < N))
