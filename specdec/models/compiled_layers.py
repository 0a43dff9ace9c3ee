"""`with_compiled_layers`: a view of a model whose decoder layers are compiled once per kind, not once per layer.

`torch.compile` of a whole model traces and lowers every layer. The layers of a decoder differ in their weights and in
their index only, so one compiled function can run all of them: weights are its inputs, and the index is 0 in the view.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.compat import captures_outputs
from specdec.models.hidden_states import foreign_hooks
from specdec.models.introspection import decoder_layers
from specdec.models.views import shallow_copy_as, view

INDEX = "layer_idx"  # attribute of modules that read the cache
SETTING = (bool, int, float, str, type(None))

Code = Callable[..., Any]


@runtime_checkable
class LayeredCache(Protocol):
    """A cache that can be divided into caches of single layers."""

    def of_layer(self, layer_idx: int) -> Any:
        """The part of one layer, which has index 0 in it."""


class LayerCompiler:
    """Compiles the forward pass of a layer for each kind of layer and each size of its inputs.

    Args:
        backend: of `torch.compile`.
    """

    def __init__(self, backend: str):
        self._backend = backend
        self._codes: dict[Hashable, Code] = {}

    def __call__(self, kind: Hashable, layer: nn.Module, hidden: Tensor, given: dict[str, Any]) -> Any:
        """Run a layer by the code of its kind.

        Args:
            kind: equal for layers that differ in nothing but their weights.
            layer: the layer, without hooks.
            hidden: (B, n, H).
            given: keyword arguments of its forward pass.
        """
        sizes = hidden.shape, tuple((name, _size(value)) for name, value in given.items())
        code = self._codes.get((kind, sizes))
        if code is None:
            code = self._codes[kind, sizes] = self._compiled(type(layer).forward)
        return code(layer, hidden, **given)

    def _compiled(self, forward: Any) -> Code:
        """Compile a function as a copy with its own code object, since torch limits the number of graphs of one.

        Precision casts are kept, so that half precision is rounded where the model rounds it.
        """

        def run(layer: nn.Module, hidden: Tensor, **given: Any) -> Any:
            return forward(layer, hidden, **given)

        own = FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
        options: Any = {"emulate_precision_casts": True} if self._backend == "inductor" else None
        return torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend, options=options)


def with_compiled_layers(model: PreTrainedModel, backend: str) -> PreTrainedModel:
    """A view of `model` with compiled decoder layers.

    The rest of the model runs as it is. Hooks of layers run outside of compiled code.

    Args:
        model: a decoder-only model.
        backend: of `torch.compile`, for example "inductor".

    Raises:
        ValueError: the layers are not found.
    """
    numbers = {id(layer): number for number, layer in enumerate(decoder_layers(model))}
    compiler = LayerCompiler(backend)

    def swap(module: nn.Module) -> nn.Module:
        number = numbers.get(id(module))
        return module if number is None else _compiled_layer(module, number, compiler)

    return view(model, swap)


def _compiled_layer(layer: nn.Module, number: int, compiler: LayerCompiler) -> nn.Module:
    """A copy of a layer that keeps its hooks, whose forward pass `compiler` runs on a copy with index 0."""
    core = _core(layer)
    if core is layer:
        core = shallow_copy_as(layer, type(layer))
    core._forward_hooks, core._forward_pre_hooks = type(layer._forward_hooks)(), type(layer._forward_pre_hooks)()
    kind = type(layer), tuple((name, type(module), _settings(module)) for name, module in core.named_modules())

    names = [*inspect.signature(type(layer).forward).parameters][2:]  # after self and the states

    def forward(self: nn.Module, hidden_states: Tensor, *others: Any, **named: Any) -> Any:
        given = {**dict(zip(names, others, strict=False)), **named}
        of_layer = {name: arg.of_layer(number) for name, arg in given.items() if isinstance(arg, LayeredCache)}
        return compiler(kind, core, hidden_states, given | of_layer)

    made: Any = type(type(layer).__name__, (type(layer),), {"forward": forward})
    return shallow_copy_as(layer, made)


def _core(module: nn.Module) -> nn.Module:
    """The module with index 0 among the layers, and without transformers' hooks, which cannot be compiled.

    What these keep of a layer's parts, such as attention weights, is not asked for in passes over drafts.
    """
    copied: Any = shallow_copy_as(module, type(module))
    copied._modules = {name: child and _core(child) for name, child in module._modules.items()}
    same = all(copied._modules[name] is child for name, child in module._modules.items())
    for number, hook in module._forward_hooks.items():
        if captures_outputs(hook):
            del copied._forward_hooks[number]
            same = False
    if isinstance(getattr(module, INDEX, None), int):
        copied.layer_idx = 0
        same = False
    return module if same else copied


def _settings(module: nn.Module) -> Hashable:
    """Values of a module on which compiled code may depend, shapes of its weights, and hooks that are compiled."""
    held = tuple((name, value) for name, value in vars(module).items() if isinstance(value, SETTING))
    shapes = tuple((name, weight.shape) for name, weight in module._parameters.items() if weight is not None)
    return held, shapes, tuple(map(id, foreign_hooks(module)))  # torch does not check hooks, by default


def _size(given: Any) -> Hashable:
    if isinstance(given, Tensor):
        return given.shape, given.dtype
    if isinstance(given, (tuple, list)):
        return tuple(map(_size, given))
    return (given,) if isinstance(given, SETTING) else (type(given),)
