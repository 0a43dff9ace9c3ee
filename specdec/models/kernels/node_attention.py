"""`node_attention`: attention of draft nodes whose bits depend on nothing but the node's own query, keys and values.

Each node reads the slots that it sees in the order of their positions. The order of its sums is therefore that of plain
decoding's single token, whatever other nodes, rows and slots there are. Sums are split at fixed columns. Keys are read
once per node, which costs more than `tree_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.models.kernels.launch import launch

MOST_DIMS = 256  # of a head
PART = 256  # columns per program of the first kernel
FEWEST = 16  # queries of a tile, the smallest matrix of a tensor core
LOG2E = 1.4426950408889634


def node_attention(
    query: Tensor, keys: Tensor, values: Tensor, order: Tensor, counts: Tensor, scaling: float
) -> Tensor:
    """Attention of n nodes per row, with G query heads per key head.

    Accumulates in float32.

    Args:
        query: (B, KV * G, n, D), one of `launch.DTYPES`; strides are free except the last, also below.
        keys: (B, KV, S, D), of the same dtype.
        values: (B, KV, S, Dv), of the same dtype.
        order: (B, n, C) int32, contiguous: slots that each node sees, by position. Entries after their number are not
            read.
        counts: (B, n) int32, contiguous, number of slots that each node sees: 1 to C.
        scaling: factor of the scores.

    Returns:
        (B, n, KV * G, Dv), contiguous.

    Example:
        ```python
        order = torch.arange(S, dtype=torch.int32).expand(B, 1, S).contiguous()
        node_attention(query, keys, values, order, torch.full((B, 1), S, dtype=torch.int32), 0.125)  # one token
        ```
    """
    B, H, n, D = query.shape
    KV, Dv, C = keys.shape[1], values.shape[3], order.shape[2]
    groups, parts = H // KV, triton.cdiv(C, PART)
    tile = max(FEWEST, triton.next_power_of_2(groups))
    dims, dims_v = (max(FEWEST, triton.next_power_of_2(size)) for size in (D, Dv))
    scores = torch.empty(2, B * n * KV, parts, tile, dtype=torch.float32, device=query.device)
    sums = torch.empty(B * n * KV, parts, tile, dims_v, dtype=torch.float32, device=query.device)
    out = query.new_empty(B, n, H, Dv)
    wide = max(dims, dims_v) > 128
    launch(
        _attend_part,
        (B * n * KV, parts),
        query,
        keys,
        values,
        order,
        counts,
        scores[0],
        scores[1],
        sums,
        scaling * LOG2E,
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        n,
        groups,
        KV,
        C,
        parts,
        D=D,
        DV=Dv,
        DIMS=dims,
        DIMS_V=dims_v,
        QUERIES=tile,
        COLUMNS=32 if wide else 64,
        PART=PART,
        warps=4,
        num_stages=2 if wide else 3,
    )
    launch(
        _combine_parts,
        (B * n * KV,),
        scores[0],
        scores[1],
        sums,
        counts,
        out,
        groups,
        KV,
        parts,
        DV=Dv,
        DIMS_V=dims_v,
        QUERIES=tile,
        PART=PART,
        warps=4,
    )
    return out


@triton.jit(do_not_specialize=["n", "groups", "heads", "width", "parts"])
def _attend_part(
    query,
    keys,
    values,
    order,
    counts,
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
    n,
    groups,
    heads,
    width,
    parts,
    D: tl.constexpr,
    DV: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_V: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
):
    """Attention of one node's queries of one key head over one part of its columns."""
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    node_of_all, head = place // heads, place % heads
    row, node = node_of_all // n, node_of_all % n
    low = part * PART
    high = tl.minimum(low + PART, tl.load(counts + node_of_all))
    if low < high:
        group, dim, dim_v = tl.arange(0, QUERIES), tl.arange(0, DIMS), tl.arange(0, DIMS_V)
        q_start = query + row * q_row + (head * groups + group) * q_head + node * q_node
        q_mask = (group < groups)[:, None] & (dim < D)[None, :]
        q = tl.load(q_start[:, None] + dim[None, :], mask=q_mask, other=0.0)
        k_start, v_start = keys + row * k_row + head * k_head, values + row * v_row + head * v_head
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, DIMS_V], tl.float32)
        for base in range(low, high, COLUMNS):
            column = base + tl.arange(0, COLUMNS)
            inside = column < high
            slot = tl.load(order + node_of_all * width + column, mask=inside, other=0)
            k_mask, v_mask = inside[None, :] & (dim < D)[:, None], inside[:, None] & (dim_v < DV)[None, :]
            k = tl.load(k_start + slot[None, :] * k_slot + dim[:, None], mask=k_mask, other=0.0)
            v = tl.load(v_start + slot[:, None] * v_slot + dim_v[None, :], mask=v_mask, other=0.0)
            score = tl.where(inside[None, :], tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            weight, kept = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
            total = total * kept + tl.sum(weight, 1)
            mixed = tl.dot(weight.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee")
            top = new_top
        to = (place * parts + part) * QUERIES + group
        tl.store(tops + to, top)
        tl.store(totals + to, total)
        tl.store(sums + to[:, None] * DIMS_V + dim_v[None, :], mixed)


@triton.jit(do_not_specialize=["groups", "heads", "parts"])
def _combine_parts(
    tops,
    totals,
    sums,
    counts,
    out,
    groups,
    heads,
    parts,
    DV: tl.constexpr,
    DIMS_V: tl.constexpr,
    QUERIES: tl.constexpr,
    PART: tl.constexpr,
):
    """Weighted sum of a node's parts, one after the other: their number may differ from that of other nodes."""
    place = tl.program_id(0).to(tl.int64)
    node_of_all, head = place // heads, place % heads
    group, dim_v = tl.arange(0, QUERIES), tl.arange(0, DIMS_V)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, DIMS_V], tl.float32)
    for part in range(tl.cdiv(tl.load(counts + node_of_all), PART)):
        at = (place * parts + part) * QUERIES + group
        part_top = tl.load(tops + at)
        new_top = tl.maximum(top, part_top)
        kept, weight = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        total = total * kept + weight * tl.load(totals + at)
        part_sum = tl.load(sums + at[:, None] * DIMS_V + dim_v[None, :])
        mixed = mixed * kept[:, None] + weight[:, None] * part_sum
        top = new_top
    to = out + ((node_of_all * heads + head) * groups + group)[:, None] * DV + dim_v[None, :]
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(to, result, mask=(group < groups)[:, None] & (dim_v < DV)[None, :])
