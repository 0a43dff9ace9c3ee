"""`Fuser`: recognises modules by their structure, and replaces those whose output a fused module reproduces."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn

from specdec.models.few_row_layers import FewRowsLinear, joinable
from specdec.models.fused_modules import (
    LAYOUTS,
    PROJECTIONS,
    ROTATE,
    FusedAttention,
    FusedLayer,
    FusedMLP,
    FusedNorm,
    epsilon,
    fused,
    rotate,
    with_globals,
)
from specdec.models.fused_probes import (
    ATTEND,
    Random,
    activation_of,
    conditions,
    products_agree,
    rounding_of,
    sums_agree,
    writes_agree,
)
from specdec.models.kernels import few_rows
from specdec.models.kernels.launch import DTYPES
from specdec.models.views import shallow_copy_as, view

log = logging.getLogger(__name__)

OUTPUT = "o_proj"
HEAD_NORMS = ("q_norm", "k_norm")
_results: dict[Hashable, Any] = {}  # of comparisons in this process


class Fuser:
    """Swaps a module for a fused one, as `view` asks for it.

    Args:
        dtype: dtype of the states that pass through the modules.
        device: their device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device

    def __call__(self, module: nn.Module) -> nn.Module:
        for fuse in (self._layer, self._attention, self._mlp, self.norm):
            made = fuse(module)
            if made is not None:
                return made
        return module

    def norm(self, module: nn.Module) -> nn.Module | None:
        """The fused form of an RMSNorm; None for any other module."""
        weights = {name: weight for name, weight in module._parameters.items() if weight is not None}
        if [*weights] != ["weight"] or module._modules or module._buffers or _is_hooked(module):
            return None
        weight, eps = weights["weight"], epsilon(module)
        if not isinstance(eps, float) or weight.dim() != 1 or weight.dtype not in DTYPES:
            return None
        random = Random(weight.dtype, weight.device)
        rounding = self._compared(module, (weight.shape, weight.dtype), lambda: rounding_of(module, random))
        return None if rounding is None else fused(module, FusedNorm, rounding=rounding)

    def _mlp(self, module: Any) -> nn.Module | None:
        if {*module._modules} != {"gate_proj", "up_proj", "down_proj", "act_fn"} or _has_tensors(module):
            return None
        if _is_hooked(module) or _is_hooked(module.act_fn):
            return None
        activation = self._compared(module, type(module.act_fn), lambda: activation_of(module, self._random))
        if activation is None:
            return None
        children = self._children(module)
        children["down_proj"] = self._few_rows(children["down_proj"], few_rows.DOWN)
        made = fused(module, FusedMLP, activation=activation, _modules=children)
        made.joined = self._gate_joins(made)
        return made

    def _gate_joins(self, module: Any) -> bool:
        layers = [module.gate_proj, module.up_proj]
        if few_rows.GATE not in few_rows.IN_USE or not joinable(*layers):
            return False
        ours, right = (shallow_copy_as(module, type(module)) for _ in range(2))
        for copied in (ours, right):
            copied._modules |= {"down_proj": nn.Identity()}
        ours.joined = True
        like = (few_rows.GATE, module.activation, *(layer.weight.shape for layer in layers))
        compare = partial(products_agree, ours, right, layers[0].in_features, self._random)
        return bool(self._compared(module, like, compare))

    def _few_rows(self, layer: Any, use: str) -> Any:
        """A layer for few rows, if that use of the kernels is faster."""
        if use not in few_rows.IN_USE or not joinable(layer):
            return layer
        made = shallow_copy_as(layer, FewRowsLinear)
        made.use = use
        compare = partial(products_agree, made, layer, layer.in_features, self._random)
        return made if self._compared(layer, (use, layer.weight.shape), compare) else layer

    def _attention(self, module: Any) -> nn.Module | None:
        own: Any = inspect.unwrap(type(module).forward)
        names = {ROTATE, ATTEND, "update"}
        if not names <= {*getattr(own, "__code__", _NoCode).co_names} or ROTATE not in own.__globals__:
            return None
        if any(map(_is_hooked, module.modules())) or not all(hasattr(module, name) for name in ("config", "head_dim")):
            return None
        children = self._children(module)
        heads = [children.get(name) for name in HEAD_NORMS]
        foldable = all(isinstance(norm, FusedNorm) and norm.weight.shape == (module.head_dim,) for norm in heads)
        like = tuple((name, type(child)) for name, child in children.items())
        for folded in (True, False) if foldable else (False,):
            compare = partial(writes_agree, module, children, folded, self._random)
            if self._compared(module, (like, folded), partial(compare, False)):
                code, apply = with_globals(own, **{ROTATE: rotate}), own.__globals__[ROTATE]
                joined = self._projections_join(module, children, (like, folded), partial(compare, True))
                children |= {OUTPUT: self._few_rows(children.get(OUTPUT), few_rows.OUT)}
                settings = {"code": code, "apply": apply, "folded": folded, "joined": joined}
                return fused(module, FusedAttention, **settings, _modules=children)
        return None

    def _projections_join(self, module: Any, children: dict[str, Any], like: Any, compare: Callable[[], Any]) -> bool:
        layers: list[Any] = [children.get(name) for name in PROJECTIONS]
        if few_rows.QKV not in few_rows.IN_USE or not joinable(*layers):
            return False
        shapes = tuple(layer.weight.shape for layer in layers)
        return bool(self._compared(module, (few_rows.QKV, like, shapes), compare))

    def _layer(self, module: Any) -> nn.Module | None:
        names = {*module._modules}
        layout = next((layout for layout in LAYOUTS if names == {"self_attn", "mlp", *layout.norms}), None)
        if layout is None or _has_tensors(module):
            return None
        children = self._children(module)
        norms = [children[name] for name in sorted(layout.norms)]
        if not all(isinstance(norm, FusedNorm) for norm in norms):
            return None
        like = tuple((type(norm), norm.rounding, norm.weight.shape) for norm in norms)
        if not self._compared(module, like, lambda: sums_agree(module, children, layout, self._random)):
            return None
        return fused(module, FusedLayer, layout=layout, _modules=children)

    def _children(self, module: nn.Module) -> dict[str, Any]:
        return {name: child and view(child, self) for name, child in module._modules.items()}

    @property
    def _random(self) -> Random:
        return Random(self._dtype, self._device)

    def _compared(self, module: nn.Module, like: Any, compare: Callable[[], Any]) -> Any:
        """The result of a comparison, run once for modules that are alike; None if it fails or cannot run now."""
        kind = type(module)
        key = (kind, kind.forward, _settings(module), like, self._dtype, self._device)
        if key not in _results:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            try:
                with conditions(self._device):
                    _results[key] = compare()
            except Exception as error:  # another structure than it seems, or a kernel that does not run here
                log.info("%s keeps its own code: %s: %s", kind.__name__, type(error).__name__, error)
                _results[key] = None
        return _results[key]


class _NoCode:
    co_names = ()


def _settings(module: nn.Module) -> Hashable:
    """Numbers and names that a module's code may depend on, apart from the number of its layer."""
    plain = (bool, int, float, str, type(None))
    held = ((name, value) for name, value in vars(module).items() if name != "layer_idx")
    return tuple(sorted((name, repr(value)) for name, value in held if isinstance(value, plain)))


def _has_tensors(module: nn.Module) -> bool:
    """Return whether a module multiplies, for example, by a tensor of its own: layers that are alike share a result."""
    return bool(module._parameters or module._buffers)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
