"""`row_kernels`: a context in which a model computes each row with the same arithmetic, however many rows a pass has.

`with_row_kernels` makes a view of the model with such layers. In the context they stand in the model itself, so that
plain decoding runs them. The model is as before when the last of several contexts ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from specdec.models.exact.attention import MASKED, with_attention
from specdec.models.exact.padded_linear import with_padded_linears
from specdec.models.exact.row_by_row import with_rows_apart
from specdec.models.introspection import device_of
from specdec.models.kernels.launch import compiles_for
from specdec.models.views import view

M = TypeVar("M", bound=PreTrainedModel)
Placed = tuple[nn.Module, str, nn.Module]  # a module after its parent and its name there

_lock = Lock()
_entered: WeakKeyDictionary[nn.Module, _Entered] = WeakKeyDictionary()


@dataclass
class _Entered:
    """A model within contexts. own: modules that were replaced, with their parents and names; count: of contexts."""

    own: list[Placed]
    count: int = 0


def on_device(model: PreTrainedModel) -> bool:
    """Return whether exact passes of a model run Triton kernels, as on a GPU."""
    return compiles_for(device_of(model))


def with_row_kernels(model: M) -> M:
    """A view of `model` that computes each row of a pass on its own; `model` itself if it is one."""
    apart = with_rows_apart(model)
    if not on_device(model):
        return view(with_padded_linears(apart), lambda module: with_attention(module, MASKED))
    from specdec.models.exact.device_layers import with_device_layers

    return with_device_layers(apart)


def exact_target(model: M) -> M:
    """The model as plain decoding has to run it for the text of exact calls: with row kernels on a device."""
    return with_row_kernels(model) if on_device(model) else model


@contextmanager
def row_kernels(model: PreTrainedModel) -> Iterator[None]:
    """Give the model the layers of `with_row_kernels` within this context. Contexts may nest and overlap.

    Example:
        ```python
        with row_kernels(model):
            output = model.generate(**inputs)
        ```
    """
    with _lock:
        entered = _entered.get(model)
        if entered is None:
            entered = _entered[model] = _Entered(_put([*_replacements(model, with_row_kernels(model))]))
        entered.count += 1
    try:
        yield
    finally:
        with _lock:
            entered.count -= 1
            if not entered.count:
                _put(_entered.pop(model).own)


def has_row_kernels(model: PreTrainedModel) -> bool:
    """Return whether a model is within `row_kernels`."""
    return model in _entered


def _put(modules: list[Placed]) -> list[Placed]:
    """Put modules into their places, and return those that were there."""
    before = [(parent, name, parent.get_submodule(name)) for parent, name, _ in modules]
    for parent, name, module in modules:
        parent._modules[name] = module
    return before


def _replacements(module: nn.Module, viewed: nn.Module) -> Iterator[Placed]:
    """Modules of a view that are more than copies which hold such modules, with their places in the original."""
    for name, child in module._modules.items():
        other = viewed._modules[name]
        if other is None or child is None or other is child:
            continue
        if type(other) is type(child) and all(value is vars(other)[key] for key, value in _settings(child)):
            yield from _replacements(child, other)
        else:
            yield module, name, other


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if "_hooks" not in name and name != "_modules"]
