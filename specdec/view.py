"""`view`: a model with other layers around the very same weights. The model itself stays as it was.

Owns copying a model's structure. Knows nothing of what the new layers compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
Swap = Callable[[nn.Module], nn.Module]


def view(model: M, swap: Swap) -> M:
    """`model` with `swap(module)` in place of its modules; where none is another one, `model` itself.

    Weights, buffers and configs are the model's. So are the hooks, as they are now: what is registered on the view
    later is the view's alone. A module that has been given another forward pass (by accelerate, by `torch.compile`, by
    hand) stays whole. What is below a module that is swapped is its new one's affair.
    """
    return _view(model, swap, {})


def _view(module: M, swap: Swap, known: dict[int, nn.Module]) -> M:
    if id(module) not in known:
        known[id(module)] = _fresh_view(module, swap, known)
    return known[id(module)]  # type: ignore[return-value]


def _fresh_view(module: nn.Module, swap: Swap, known: dict[int, nn.Module]) -> nn.Module:
    if (
        "forward" in vars(module)
        or vars(module).get("_compiled_call_impl")
        or isinstance(module, torch.jit.ScriptModule)
    ):
        return module
    swapped = swap(module)
    if swapped is not module:
        return swapped
    children = {name: child and _view(child, swap, known) for name, child in module._modules.items()}
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    copy = twin(module, type(module))
    copy._modules = children
    return copy


def whole(module: M) -> M:
    """A copy, this process's own, of a module whose weights lie in several processes; all of them must ask for it."""
    weights = {name: weight for name, weight in module._parameters.items() if weight is not None}
    if any(hasattr(weight, "ds_id") for weight in weights.values()):
        raise ValueError(f"the weights of a {type(module).__name__} lie in several processes (DeepSpeed's ZeRO-3)")
    copy = twin(module, type(module))
    copy._parameters = {name: nn.Parameter(_gathered(weight), requires_grad=False) for name, weight in weights.items()}
    copy._parameters |= {name: None for name in module._parameters if name not in weights}
    vars(copy).pop("forward", None)  # of transformers' tensor parallelism: waits for the other processes
    for hooks in (copy._forward_pre_hooks, copy._forward_hooks):  # of FSDP: so do they
        hooks.clear()
    return copy


def _gathered(weight: Any) -> torch.Tensor:
    return weight.detach().full_tensor() if hasattr(weight, "full_tensor") else weight.detach().clone()


def twin(module: nn.Module, kind: type[M]) -> M:
    """A module of class `kind` with all that `module` has; hooks and children may change in one without the other."""
    copy = object.__new__(kind)
    for name, value in vars(module).items():
        own = "_hooks" in name or name == "_modules"
        copy.__dict__[name] = value.copy() if own and isinstance(value, dict) else value
    return copy
