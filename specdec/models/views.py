"""`view`: a model with some layers replaced that shares the original's weights. The original is not changed.

Copies a model's structure, either the changed part (`view`) or all of it (`apart`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
Swap = Callable[[nn.Module], nn.Module]
SMALL = 65_536  # largest tensor that is copied as state (RoPE frequencies, which a pass may write) and not shared


def view(model: M, swap: Swap) -> M:
    """A view of `model` in which each module is replaced by `swap(module)`; `model` itself if nothing is replaced.

    The view shares weights, buffers and configs. It copies the hooks: those registered on the view later are its own.
    A module whose forward pass was replaced (by accelerate, `torch.compile` or the user) is kept with all its children.
    Children of a replaced module are not visited.

    Args:
        model: the model to view.
        swap: returns the replacement of a module, or the module itself.

    Example:
        ```python
        gelu = view(model, lambda module: nn.GELU() if isinstance(module, nn.SiLU) else module)
        ```
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
    changed = shallow_copy_as(module, type(module))
    changed._modules = children
    return changed


def apart(model: M) -> M:
    """A copy of the model that shares its weights, with its own config, training modes and small buffers.

    Needed where another thread decodes with the model, since each pass builds masks from the config.
    """
    modules = list(model.modules())
    shared = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.numel() > SMALL)]
    for held in map(vars, modules):
        shared += [value for value in held.values() if isinstance(value, torch.Tensor) and value.numel() > SMALL]
        # accelerate's hooks for offloading; a `generate` that was set on the model
        shared += [held[name] for name in ("_hf_hook", "generate") if name in held]
    return copy.deepcopy(model, {id(kept): kept for kept in shared})


def in_eval_mode(model: M) -> M:
    """`model` itself if all of it is in eval mode, else a view of it that is."""
    return _evaluating(model, {}) if any(module.training for module in model.modules()) else model


def _evaluating(module: M, known: dict[int, nn.Module]) -> M:
    if id(module) not in known:
        known[id(module)] = _fresh_evaluating(module, known)
    return known[id(module)]  # type: ignore[return-value]


def _fresh_evaluating(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    children = {name: child and _evaluating(child, known) for name, child in module._modules.items()}
    if not module.training and all(children[name] is child for name, child in module._modules.items()):
        return module
    if "forward" in vars(module):  # for example accelerate's, which refers to its module and is copied with it
        copied = apart(module).eval()
        for ours, theirs in zip(copied.modules(), module.modules(), strict=True):
            if "forward" in vars(ours) and vars(ours)["forward"] is vars(theirs)["forward"]:
                del ours.forward  # a function that runs `module`, for example from `torch.compile`
        return copied
    evaluating = shallow_copy_as(module, type(module))
    evaluating._modules, evaluating.training = children, False
    vars(evaluating).pop("_compiled_call_impl", None)  # it runs `module`
    return evaluating


def whole(module: M) -> M:
    """An unsharded copy of a module whose weights are sharded over processes. All processes must call this.

    Raises:
        ValueError: the weights are sharded by DeepSpeed's ZeRO-3, which is not supported.
    """
    weights = {name: weight for name, weight in module._parameters.items() if weight is not None}
    if any(hasattr(weight, "ds_id") for weight in weights.values()):
        raise ValueError(f"the weights of a {type(module).__name__} are sharded over processes by DeepSpeed's ZeRO-3")
    own = shallow_copy_as(module, type(module))
    own._parameters = {name: nn.Parameter(_gathered(weight), requires_grad=False) for name, weight in weights.items()}
    own._parameters |= {name: None for name in module._parameters if name not in weights}
    vars(own).pop("forward", None)  # set by transformers' tensor parallelism: waits for the other processes
    for hooks in (own._forward_pre_hooks, own._forward_hooks):  # set by FSDP: these wait as well
        hooks.clear()
    return own


def _gathered(weight: Any) -> torch.Tensor:
    return weight.detach().full_tensor() if hasattr(weight, "full_tensor") else weight.detach().clone()


def shallow_copy_as(module: nn.Module, kind: type[M]) -> M:
    """A shallow copy of `module` as an instance of `kind`, with its own dictionaries of hooks and children."""
    made = object.__new__(kind)
    for name, value in vars(module).items():
        own = "_hooks" in name or name == "_modules"
        made.__dict__[name] = value.copy() if own and isinstance(value, dict) else value
    return made
