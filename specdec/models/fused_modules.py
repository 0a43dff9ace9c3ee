"""Modules with fused kernels, made as shallow copies of those they replace: `FusedNorm`, `FusedMLP`, ...

Each is mixed into the class of the original module, and runs its code where the kernels do not take the tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from specdec.models.compat import CACHE
from specdec.models.few_row_layers import gated_by, stand_ins
from specdec.models.kernels import rms_norm, rotary
from specdec.models.kernels.activation import gated
from specdec.models.kernels.launch import fits
from specdec.models.kernels.rms_norm import Norm
from specdec.models.views import shallow_copy_as

ROTATE = "apply_rotary_pos_emb"  # transformers' function in all modeling files whose attention is recognised


_classes: dict[tuple[Any, Any], Any] = {}


def fused(module: nn.Module, mixin: type[nn.Module], **attributes: Any) -> Any:
    """A shallow copy of a module with the forward pass of `mixin`."""
    kind = type(module)
    if (mixin, kind) not in _classes:
        _classes[mixin, kind] = type(f"Fused{kind.__name__}", (mixin, kind), {})
    made = shallow_copy_as(module, _classes[mixin, kind])
    vars(made).update(attributes)
    return made


def epsilon(module: nn.Module) -> Any:
    """The number that a norm adds to the mean square; None if the module has none."""
    given = getattr(module, "variance_epsilon", None)
    return getattr(module, "eps", None) if given is None else given


class FusedNorm(nn.Module):
    """An RMSNorm in one kernel. rounding: see `Norm`."""

    rounding: int
    weight: Tensor

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, epsilon(self), self.rounding)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return rms_norm.normalized(x, norm) if rms_norm.takes(x, norm) else super().forward(x)


class FusedMLP(nn.Module):
    """A gated MLP with one kernel between its products.

    Attributes:
        activation: see `gated`.
        joined: the first two products of few rows run in that kernel as well.
    """

    activation: int
    joined: bool = False

    def forward(self, x: Tensor) -> Tensor:
        states = gated_by(x, self.gate_proj, self.up_proj, self.activation) if self.joined else None
        if states is not None:
            return self.down_proj(states)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if fits(gate, up) and gate.shape == up.shape:
            return self.down_proj(gated(gate, up, self.activation))
        return self.down_proj(self.act_fn(gate) * up)


@dataclass(frozen=True)
class Layout:
    """Names of the norms in a decoder layer: before attention, and around the sums after attention and MLP.

    The first norm of a sum applies to the update before it is added, the second to the sum.
    """

    first: str
    attention: tuple[str | None, str]
    mlp: str | None = None

    @property
    def norms(self) -> set[str]:
        return {name for name in (self.first, *self.attention, self.mlp) if name is not None}


LAYOUTS = (
    Layout("input_layernorm", (None, "post_attention_layernorm")),  # Llama
    Layout(  # Gemma 2 and 3
        "input_layernorm", ("post_attention_layernorm", "pre_feedforward_layernorm"), "post_feedforward_layernorm"
    ),
)


class FusedLayer(nn.Module):
    """A decoder layer with one kernel for each residual sum and the norms around it."""

    layout: Layout

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            return super().forward(hidden_states, *args, **kwargs)
        layout = self.layout
        normed = getattr(self, layout.first)(hidden_states)
        attended = self.self_attn(hidden_states=normed, **kwargs)[0]
        states, normed = self._added(attended, hidden_states, *layout.attention)
        return self._added(self.mlp(normed), states, layout.mlp, None)[0]

    def _added(self, update: Tensor, residual: Tensor, inner: str | None, outer: str | None) -> tuple[Tensor, Any]:
        before, after = (None if name is None else getattr(self, name) for name in (inner, outer))
        norms = [None if module is None else module.norm for module in (before, after)]
        known = update.shape == residual.shape and any(norm is not None for norm in norms)
        if known and rms_norm.takes(update, *norms) and fits(update, residual):
            return rms_norm.added(update, residual, *norms)
        total = residual + (update if before is None else before(update))
        return total, None if after is None else after(total)


class FusedAttention(nn.Module):
    """Attention that rotates and writes in one kernel, given a cache with fixed buffers (`SlottedCache.fixed_buffers`).

    Runs the module's own code, in which `RotaryWrite` stands for the rotation and for the cache. With any other cache
    it runs the module as it is.

    Attributes:
        code: `with_globals` of the module's forward pass, with `rotate` for `ROTATE`.
        apply: the module's own `ROTATE`.
        folded: the kernel also normalizes the heads of queries and keys.
        joined: queries, keys and values of few rows are computed in one kernel.
    """

    code: Callable[..., Any]
    apply: Callable[..., Any]
    folded: bool
    joined: bool = False

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        if not hasattr(cache, "fixed_buffers") or not isinstance(position_embeddings, tuple):
            return super().forward(hidden_states, position_embeddings=position_embeddings, **kwargs)
        module, norms = self._copied(), (self.q_norm, self.k_norm) if self.folded else (None, None)
        write = RotaryWrite(cache, position_embeddings, norms, self.apply)
        result = self.code(module, hidden_states, position_embeddings=(write, write), **{**kwargs, CACHE: write})
        if write.waits:
            raise RuntimeError(f"{type(self).__name__} rotates keys without writing them to the cache")
        return result

    def _copied(self) -> nn.Module:
        """A copy with stand-ins for what the kernels do. Made in each pass, since this may get another config."""
        made = shallow_copy_as(self, type(self))
        if self.folded:
            made._modules |= {"q_norm": UNCHANGED, "k_norm": UNCHANGED}
        if self.joined:
            layers = [getattr(self, name) for name in PROJECTIONS]
            vars(made).update(zip(PROJECTIONS, stand_ins(*layers), strict=True))
        return made


PROJECTIONS = ("q_proj", "k_proj", "v_proj")
UNCHANGED = nn.Identity()


def rotate(query: Tensor, key: Tensor, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`ROTATE` of a forward pass whose cosines and sines are a `RotaryWrite`."""
    return cos.rotate(query, key, *args, **kwargs)


def with_globals(function: Callable[..., Any], **replaced: Any) -> Callable[..., Any]:
    """A copy of a function, without its decorators, that sees other objects under some global names."""
    own: Any = inspect.unwrap(function)
    made = FunctionType(own.__code__, own.__globals__ | replaced, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


class RotaryWrite:
    """Rotation and cache write of one attention pass, deferred until the keys are written.

    Stands for the cosines and sines, and for the cache. `rotate` returns a tensor for the rotated queries that `update`
    fills, and the keys as they are.

    Args:
        cache: a cache with `fixed_buffers`.
        rotation: cosines and sines (B or 1, n, dim).
        norms: `FusedNorm` of the heads of queries and keys; None where there is none.
        apply: rotates queries and keys that the kernel does not take.

    Attributes:
        waits: the queries are not filled yet.
    """

    def __init__(self, cache: Any, rotation: tuple[Tensor, Tensor], norms: tuple[Any, Any], apply: Callable[..., Any]):
        self._cache, self._rotation, self._norms, self._apply = cache, rotation, norms, apply
        self._given: tuple[Tensor, Tensor, Tensor] | None = None
        self.waits = False

    def rotate(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if args or kwargs or not fits(query, key, *self._rotation):
            return self._rotated(query, key, *args, **kwargs)
        self._given, self.waits = (query, key, torch.empty_like(query)), True
        return self._given[2], key

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Rotate and write, see `SlottedCache.update`."""
        if self._given is None:
            return self._cache.update(key, value, layer_idx, *args, **kwargs)
        query, given, out = self._given
        if key is not given:
            raise RuntimeError("keys were changed between their rotation and the cache")
        buffers, self.waits = self._cache.fixed_buffers(layer_idx), False
        one, two = (None if module is None else module.norm for module in self._norms)
        if rotary.takes(query, key, value, self._rotation, buffers, (one, two)):
            rotary.rotated_and_written(out, query, key, value, self._rotation, buffers, (one, two))
            return buffers[0], buffers[1]
        rotated, key = self._rotated(query, key)
        out.copy_(rotated)
        return self._cache.update(key, value, layer_idx, *args, **kwargs)

    def _rotated(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        states = (query, key)
        normed = [x if norm is None else norm(x) for x, norm in zip(states, self._norms, strict=True)]
        return self._apply(*normed, *self._rotation, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
