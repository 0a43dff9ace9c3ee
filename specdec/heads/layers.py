"""Decoder layers of draft heads: attention over visible slots, rotary embedding."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from specdec.heads.config import LayerConfig
from specdec.models.draft_attention import attend

SIZES = 64  # for which flex attention is compiled

Visible = Tensor | BlockMask | None


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer of width H."""

    def __init__(self, config: LayerConfig, index: int, input_norm: bool = True):
        super().__init__()
        H = config.hidden_size
        self.input_layernorm = LlamaRMSNorm(H, config.rms_norm_eps) if input_norm else None
        self.self_attn = Attention(config, index, H)
        self.post_attention_layernorm = LlamaRMSNorm(H, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, h: Tensor, rotation: tuple[Tensor, Tensor], visible: Visible, cache: Cache | None) -> Tensor:
        x = h if self.input_layernorm is None else self.input_layernorm(h)
        h = h + self.self_attn(x, rotation, visible, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class Attention(nn.Module):
    """Grouped-query attention with RoPE, and with a norm per head if `config.qk_norm` is set."""

    def __init__(self, config: LayerConfig, index: int, input_size: int):
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        q, kv, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(input_size, q * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, kv * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, kv * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(q * self.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], visible: Visible, cache: Cache | None) -> Tensor:
        q = self._per_head(self.q_proj(x), self.q_norm)
        k, v = self.append_kv(x, rotation, cache)
        q = _rotate(q, rotation)
        if isinstance(visible, Tensor):
            return self.o_proj(attend(q, k, v, visible).flatten(2))
        k, v = (t.repeat_interleave(self.groups, 1) if self.groups > 1 else t for t in (k, v))
        if visible is None:
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        else:
            q, k = (
                q.to(v.dtype),
                k.to(v.dtype),
            )  # up to torch 2.10 autocast does not convert what was rotated in float32
            out = _flex_attention(q.is_cuda)(q, k, v, block_mask=visible)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def append_kv(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Append the keys and values of x to the cache. Returns all of them, (B, heads, slots, dim) each."""
        k = _rotate(self._per_head(self.k_proj(x), self.k_norm), rotation)
        v = self._per_head(self.v_proj(x))
        return (k, v) if cache is None else cache.update(k, v, self.index)

    def _per_head(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Reshape (B, n, heads * dim) to (B, heads, n, dim)."""
        x = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return x if norm is None else norm(x)


@cache
def _flex_attention(compiled: bool) -> Any:
    """Return flex attention. Only the compiled version skips masked blocks; the eager one is the CPU reference.

    It is compiled for each step's keys, with and without gradients, in whole and last batches. That is more than torch
    compiles by default before it falls back to the eager version.
    """
    if not compiled:
        return flex_attention
    from torch._dynamo import config

    run = torch.compile(flex_attention, dynamic=False)

    def within_limit(*args: Any, **kwargs: Any) -> Any:
        with config.patch(recompile_limit=SIZES):
            return run(*args, **kwargs)

    return within_limit


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to the leading dimensions that it covers. x: (B, heads, n, dim)."""
    cos, sin = (t[:, None] for t in rotation)
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    turned = turned * cos + rotate_half(turned) * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
