"""`view`: a model with other layers around the very same weights. The model itself stays as it was.

Owns copying a model's structure, all of it (`apart`) or what changes. Knows nothing of what the new layers compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
Swap = Callable[[nn.Module], nn.Module]
SMALL = 65_536  # numbers in a tensor that is state (RoPE's frequencies, which a pass may write) rather than weights


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
    changed = shallow_copy_as(module, type(module))
    changed._modules = children
    return changed


def apart(model: M) -> M:
    """The model's structure around its very weights, with a config, modes and state of its own.

    Another thread may be decoding with the model: masks are built from its config at each pass.
    """
    modules = list(model.modules())
    shared = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.numel() > SMALL)]
    for held in map(vars, modules):
        shared += [value for value in held.values() if isinstance(value, torch.Tensor) and value.numel() > SMALL]
        shared += [held[name] for name in ("_hf_hook", "generate") if name in held]  # accelerate's: offloaded; a user's
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
    if "forward" in vars(module):  # accelerate's, say, which holds the module that it is of and is copied with it
        copied = apart(module).eval()
        for ours, theirs in zip(copied.modules(), module.modules(), strict=True):
            if "forward" in vars(ours) and vars(ours)["forward"] is vars(theirs)["forward"]:
                del ours.forward  # a function, by `torch.compile` say, that runs `module`
        return copied
    evaluating = shallow_copy_as(module, type(module))
    evaluating._modules, evaluating.training = children, False
    vars(evaluating).pop("_compiled_call_impl", None)  # it runs `module`
    return evaluating


def whole(module: M) -> M:
    """A copy, this process's own, of a module whose weights lie in several processes; all of them must ask for it."""
    weights = {name: weight for name, weight in module._parameters.items() if weight is not None}
    if any(hasattr(weight, "ds_id") for weight in weights.values()):
        raise ValueError(f"the weights of a {type(module).__name__} lie in several processes (DeepSpeed's ZeRO-3)")
    own = shallow_copy_as(module, type(module))
    own._parameters = {name: nn.Parameter(_gathered(weight), requires_grad=False) for name, weight in weights.items()}
    own._parameters |= {name: None for name in module._parameters if name not in weights}
    vars(own).pop("forward", None)  # of transformers' tensor parallelism: waits for the other processes
    for hooks in (own._forward_pre_hooks, own._forward_hooks):  # of FSDP: so do they
        hooks.clear()
    return own


def _gathered(weight: Any) -> torch.Tensor:
    return weight.detach().full_tensor() if hasattr(weight, "full_tensor") else weight.detach().clone()


def shallow_copy_as(module: nn.Module, kind: type[M]) -> M:
    """A module of class `kind` with all that `module` has; hooks and children may change in one without the other."""
    made = object.__new__(kind)
    for name, value in vars(module).items():
        own = "_hooks" in name or name == "_modules"
        made.__dict__[name] = value.copy() if own and isinstance(value, dict) else value
    return made
