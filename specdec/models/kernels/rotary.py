"""Rotary embedding of queries and keys in one kernel with the write of keys and values: `rotated_and_written`.

Optionally normalizes each head of the queries and keys before. Rounds as transformers' `apply_rotary_pos_emb` does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.models.kernels.launch import fits, launch, power_of_two
from specdec.models.kernels.rms_norm import NONE, Norm, rms_scale, weighted

Norms = tuple[Norm | None, Norm | None]  # of the heads of queries and of keys


def rotated_and_written(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: tuple[Tensor, Tensor],
    buffers: tuple[Tensor, Tensor, Tensor],
    norms: Norms = (None, None),
) -> None:
    """Rotate queries into `out`, and rotated keys and values into their buffers.

    Args:
        out: (B, heads, n, dim), the result for the queries.
        query: (B, heads, n, dim), with any strides but the last, which is 1. So are all others.
        key: (B, kv_heads, n, dim).
        value: (B, kv_heads, n, value_dim).
        rotation: cosines and sines, (B or 1, n, dim) each.
        buffers: keys (B, kv_heads, S, dim), values (B, kv_heads, S, value_dim), and slots (B, n) int64 to write to.
            A slot outside of the buffers is not written.
        norms: norms of each head, applied before the rotation.

    Example:
        ```python
        out = torch.empty_like(query)
        rotated_and_written(out, query, key, value, (cos, sin), (keys, values, slots))
        ```
    """
    (cos, sin), (keys, values, slots) = rotation, buffers
    B, heads, n, dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
    one, two = norms
    alone = cos.shape[0] == 1
    launch(
        _kernel,
        (B * n, heads + kv_heads),
        query,
        key,
        value,
        cos,
        sin,
        out,
        keys,
        values,
        slots,
        None if one is None else one.weight,
        None if two is None else two.weight,
        0.0 if one is None else one.eps,
        0.0 if two is None else two.eps,
        n,
        keys.shape[2],
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        0 if alone else cos.stride(0),
        cos.stride(1),
        0 if alone else sin.stride(0),
        sin.stride(1),
        *out.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        *slots.stride(),
        HEADS=heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        BLOCK=power_of_two(dim // 2),
        VALUE_BLOCK=power_of_two(value_dim),
        QUERY_NORM=NONE if one is None else one.rounding,
        KEY_NORM=NONE if two is None else two.rounding,
        warps=max(1, min(4, dim // 128)),
    )


def takes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: tuple[Tensor, Tensor],
    buffers: tuple[Tensor, Tensor, Tensor],
    norms: Norms = (None, None),
) -> bool:
    """Return whether the kernel takes these arguments, see `rotated_and_written`."""
    keys, values, slots = buffers
    tensors = (query, key, value, *rotation, keys, values)
    weights = [norm.weight for norm in norms if norm is not None]
    B, _, n, dim = query.shape
    return (
        fits(*tensors, *weights)
        and dim % 2 == 0
        and all(given.stride(-1) == 1 for given in tensors)
        and all(weight.shape == (dim,) for weight in weights)
        and all(given.dim() == 3 and given.shape[0] in (1, B) and given.shape[1:] == (n, dim) for given in rotation)
        and rotation[0].shape == rotation[1].shape
        and (key.shape[0], key.shape[2], key.shape[3]) == (B, n, dim)
        and value.shape[:3] == key.shape[:3]
        and (keys.shape[:2], keys.shape[3]) == (key.shape[:2], dim)
        and values.shape == (*keys.shape[:3], value.shape[3])
        and slots.shape == (B, n)
    )


@triton.jit
def _rotated(x, to, weight, eps, cos, sin, DIM: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Rotate one head from `x` to `to`; cos, sin: their rows."""
    dtype = to.dtype.element_ty
    low = tl.arange(0, BLOCK)
    high = low + DIM // 2
    inside = low < DIM // 2
    a = tl.load(x + low, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + high, mask=inside, other=0.0).to(tl.float32)
    if NORM != 0:
        scale = rms_scale(tl.sum(a * a + b * b, 0), eps, DIM)
        a = weighted(a * scale, tl.load(weight + low, mask=inside, other=0.0), dtype, NORM)
        b = weighted(b * scale, tl.load(weight + high, mask=inside, other=0.0), dtype, NORM)
    cos_a = tl.load(cos + low, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + high, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + low, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + high, mask=inside, other=0.0).to(tl.float32)
    first = (a * cos_a).to(dtype).to(tl.float32) - (b * sin_a).to(dtype).to(tl.float32)
    second = (b * cos_b).to(dtype).to(tl.float32) + (a * sin_b).to(dtype).to(tl.float32)
    tl.store(to + low, first.to(dtype), mask=inside)
    tl.store(to + high, second.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["n", "room", "slots_b", "slots_n"])
def _kernel(
    query,
    key,
    value,
    cos,
    sin,
    out,
    keys,
    values,
    slots,
    query_weight,
    key_weight,
    query_eps,
    key_eps,
    n,
    room,
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    cos_b,
    cos_n,
    sin_b,
    sin_n,
    out_b,
    out_h,
    out_n,
    keys_b,
    keys_h,
    keys_s,
    values_b,
    values_h,
    values_s,
    slots_b,
    slots_n,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
):
    token = tl.program_id(0)
    row = (token // n).to(tl.int64)
    node = (token % n).to(tl.int64)
    cos += row * cos_b + node * cos_n
    sin += row * sin_b + node * sin_n
    head = tl.program_id(1).to(tl.int64)
    if head < HEADS:
        from_query = query + row * query_b + head * query_h + node * query_n
        to_out = out + row * out_b + head * out_h + node * out_n
        _rotated(from_query, to_out, query_weight, query_eps, cos, sin, DIM, BLOCK, QUERY_NORM)
    else:
        kv_head = head - HEADS
        slot = tl.load(slots + row * slots_b + node * slots_n)
        if (slot >= 0) & (slot < room):
            from_key = key + row * key_b + kv_head * key_h + node * key_n
            to_keys = keys + row * keys_b + kv_head * keys_h + slot * keys_s
            _rotated(from_key, to_keys, key_weight, key_eps, cos, sin, DIM, BLOCK, KEY_NORM)
            at = tl.arange(0, VALUE_BLOCK)
            inside = at < VALUE_DIM
            from_value = value + row * value_b + kv_head * value_h + node * value_n
            to_values = values + row * values_b + kv_head * values_h + slot * values_s
            tl.store(to_values + at, tl.load(from_value + at, mask=inside, other=0.0), mask=inside)
