"""`tree_attention`: attention of a few draft nodes over a long KV buffer, as Triton kernels for GPUs.

The slots of a row are split over programs, so that one row keeps all multiprocessors busy (Flash-Decoding). Each
program reads the keys and values of its slots once for all query heads that share them. A second kernel combines the
parts. The slots between the first and the last visible one are read; their bounds are read from memory, so that one
captured graph serves rows of all lengths.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_DIMS = 256  # of a head
MOST_PARTS = 64  # parts per row and key head, which one program combines
PROGRAMS = 2  # per multiprocessor
LOG2E = 1.4426950408889634


class Tiles(NamedTuple):
    """Tile sizes and launch options of the attention kernel.

    Attributes:
        queries: packed queries per program, a power of two of at least 16.
        slots: slots per step, a power of two of at least 16.
        warps: warps per program.
        stages: steps whose loads are in flight.
    """

    queries: int
    slots: int
    warps: int
    stages: int


def tiles_for(queries: int, dims: int, itemsize: int) -> Tiles:
    """Tiles for so many packed queries and head dimensions; itemsize: bytes per entry of the keys.

    On Hopper two programs fit on a multiprocessor: at most 113 KiB of shared memory and 256 registers per thread each.
    """
    if itemsize > 2:  # without tensor cores a product takes many registers
        return Tiles(16, 16, 8, 2)
    padded = min(64, max(16, triton.next_power_of_2(queries)))
    if dims > 128:
        return Tiles(padded, 32, 4, 2)
    return Tiles(padded, 64 if padded < 64 else 32, 4, 3)  # the fastest on an H100 (regression/attention.py)


def parts_for(programs: int, slots: int, step: int, device: torch.device) -> int:
    """Number of parts, a power of two, to split the slots into.

    Args:
        programs: programs per part.
        slots: S.
        step: slots per step of a program.
        device: the device, which should get `PROGRAMS` programs per multiprocessor.
    """
    wanted = max(1, PROGRAMS * _multiprocessors(device) // programs)
    return int(min(1 << (wanted.bit_length() - 1), triton.next_power_of_2(triton.cdiv(slots, step)), MOST_PARTS))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def visible_range(mask: Tensor) -> tuple[Tensor, Tensor]:
    """First slot that a row's queries see, and the last one + 1: (B,) int32 each; 0 and 0 if they see none.

    Args:
        mask: (B, n, S) bool.
    """
    B, _, S = mask.shape
    seen = mask.any(1).view(torch.uint8)
    first, end = (torch.empty(B, dtype=torch.int32, device=mask.device) for _ in range(2))
    with torch.cuda.device_of(mask):
        _visible_range[(B,)](seen, first, end, S, seen.stride(0), min(8192, triton.next_power_of_2(S)), num_warps=8)
    return first, end


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    first: Tensor,
    end: Tensor,
    scaling: float,
    *,
    tiles: Tiles | None = None,
    parts: int | None = None,
) -> Tensor:
    """Attention of n nodes per row over the S slots of KV buffers, with G query heads per key head.

    Accumulates in float32. Slots outside of [first, end) are not read. A query that sees no slot gets zeros.

    Args:
        query: (B, KV * G, n, D), one of `launch.DTYPES`; strides are free except the last, also below.
        keys: (B, KV, S, D), of the same dtype.
        values: (B, KV, S, Dv), of the same dtype.
        mask: (B, n, S) bool, the slots that each node sees. The batch may be expanded.
        first: (B,) int32, see `visible_range`.
        end: (B,) int32, likewise.
        scaling: factor of the scores.
        tiles: tile sizes; None: `tiles_for`.
        parts: parts to split the slots into, a power of two; None: `parts_for`.

    Returns:
        (B, n, KV * G, Dv), contiguous.
    """
    B, H, n, D = query.shape
    KV, S, Dv = keys.shape[1], keys.shape[2], values.shape[3]
    groups = H // KV
    queries = groups * n
    tiles = tiles or tiles_for(queries, max(D, Dv), keys.element_size())
    across = triton.cdiv(queries, tiles.queries)
    parts = parts or parts_for(B * KV * across, S, tiles.slots, query.device)
    scores = torch.empty(2, B * KV, queries, parts, dtype=torch.float32, device=query.device)
    sums = torch.empty(B * KV, queries, parts, Dv, dtype=torch.float32, device=query.device)
    out = query.new_empty(B, n, H, Dv)
    dims_v = max(16, triton.next_power_of_2(Dv))
    with torch.cuda.device_of(query):
        _attend_part[(across * B * KV, parts)](
            query,
            keys,
            values,
            mask.view(torch.uint8),
            first,
            end,
            scores[0],
            scores[1],
            sums,
            scaling * LOG2E,
            *query.stride()[:3],
            *keys.stride()[:3],
            *values.stride()[:3],
            *mask.stride()[:2],
            n,
            groups,
            KV,
            across,
            parts,
            D=D,
            DV=Dv,
            DIMS=max(16, triton.next_power_of_2(D)),
            DIMS_V=dims_v,
            QUERIES=tiles.queries,
            SLOTS=tiles.slots,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        _combine_parts[(B * KV * queries,)](
            scores[0],
            scores[1],
            sums,
            first,
            end,
            out,
            n,
            groups,
            KV,
            DV=Dv,
            DIMS_V=dims_v,
            SLOTS=tiles.slots,
            PARTS=parts,
        )
    return out


@triton.jit(do_not_specialize=["S"])
def _visible_range(seen, first, end, S, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    low = tl.full([BLOCK], 2**31 - 1, tl.int32)
    high = tl.zeros([BLOCK], tl.int32)
    for start in range(0, S, BLOCK):
        slot = start + place
        visible = tl.load(seen + row.to(tl.int64) * row_stride + slot, mask=slot < S, other=0) != 0
        low = tl.where(visible, tl.minimum(low, slot), low)
        high = tl.where(visible, slot + 1, high)
    stop = tl.max(high, 0)
    tl.store(first + row, tl.minimum(tl.min(low, 0), stop))
    tl.store(end + row, stop)


@triton.jit(do_not_specialize=["n", "groups", "heads", "across", "parts"])
def _attend_part(
    query,
    keys,
    values,
    mask,
    first,
    end,
    tops,
    totals,
    sums,
    scale,
    q_row,
    q_head,
    q_node,
    k_row,
    k_head,
    k_slot,
    v_row,
    v_head,
    v_slot,
    m_row,
    m_node,
    n,
    groups,
    heads,
    across,
    parts,
    D: tl.constexpr,
    DV: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_V: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Attention of a tile of packed queries, group by group, over one part of the slots of a row and key head."""
    tile, part = tl.program_id(0) % across, tl.program_id(1)
    row_head = (tl.program_id(0) // across).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    start, stop = tl.load(first + row), tl.load(end + row)
    share = tl.cdiv(tl.cdiv(stop - start, SLOTS), parts) * SLOTS
    low = start + part * share
    high = tl.minimum(low + share, stop)
    if low < high:
        packed = tile * QUERIES + tl.arange(0, QUERIES)
        used = packed < groups * n
        group, node = packed // n, packed % n
        dim, dim_v, place = tl.arange(0, DIMS), tl.arange(0, DIMS_V), tl.arange(0, SLOTS)
        q_start = query + row * q_row + (head * groups + group) * q_head + node * q_node
        q = tl.load(q_start[:, None] + dim[None, :], mask=used[:, None] & (dim < D)[None, :], other=0.0)
        k_start, v_start = keys + row * k_row + head * k_head, values + row * v_row + head * v_head
        m_start = mask + row * m_row + node * m_node
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, DIMS_V], tl.float32)
        for base in range(low, high, SLOTS):
            slot = base + place
            inside = slot < high
            k = tl.load(
                k_start + slot[None, :] * k_slot + dim[:, None], mask=inside[None, :] & (dim < D)[:, None], other=0.0
            )
            seen = tl.load(m_start[:, None] + slot[None, :], mask=used[:, None] & inside[None, :], other=0)
            v = tl.load(
                v_start + slot[:, None] * v_slot + dim_v[None, :],
                mask=inside[:, None] & (dim_v < DV)[None, :],
                other=0.0,
            )
            score = tl.dot(q, k, input_precision="ieee") * scale
            score = tl.where(seen != 0, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # inf - inf is NaN
            weight = tl.exp2(score - finite[:, None])
            kept = tl.exp2(top - finite)
            total = total * kept + tl.sum(weight, 1)
            mixed = tl.dot(weight.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee")
            top = new_top
        to = (row_head * groups * n + packed) * parts + part
        tl.store(tops + to, top, mask=used)
        tl.store(totals + to, total, mask=used)
        tl.store(sums + to[:, None] * DV + dim_v[None, :], mixed, mask=used[:, None] & (dim_v < DV)[None, :])


@triton.jit(do_not_specialize=["n", "groups", "heads"])
def _combine_parts(
    tops,
    totals,
    sums,
    first,
    end,
    out,
    n,
    groups,
    heads,
    DV: tl.constexpr,
    DIMS_V: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Weighted sum of the parts of one packed query."""
    place = tl.program_id(0).to(tl.int64)
    row_head, packed = place // (groups * n), place % (groups * n)
    row, head = row_head // heads, row_head % heads
    steps = tl.cdiv(tl.load(end + row) - tl.load(first + row), SLOTS)
    part, dim = tl.arange(0, PARTS), tl.arange(0, DIMS_V)
    used = part * tl.cdiv(steps, PARTS) < steps  # others have written nothing
    top = tl.load(tops + place * PARTS + part, mask=used, other=float("-inf"))
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight * tl.load(totals + place * PARTS + part, mask=used, other=0.0), 0)
    at = (place * PARTS + part)[:, None] * DV + dim[None, :]
    mixed = tl.load(sums + at, mask=used[:, None] & (dim < DV)[None, :], other=0.0)
    mixed = tl.sum(mixed * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    to = ((row * n + packed % n) * heads * groups + head * groups + packed // n) * DV + dim
    tl.store(out + to, mixed.to(out.dtype.element_ty), mask=dim < DV)
