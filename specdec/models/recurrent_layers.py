"""`with_states`: a view of a model whose recurrent layers can run over draft trees.

Finds the functions with which the layers mix tokens (convolutions, delta rule, Mamba) by their parameters, and replaces
them in the view. The replacements call the model's own function for known tokens and our kernels for a draft's nodes.
Outside of a pass with `States` (`passing_states`) they only call the model's own. The model itself is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from specdec.models.cache.linear_recurrence import Recurrence, Scan
from specdec.models.cache.recurrent_passes import Drafted
from specdec.models.cache.recurrent_states import States, passing_states
from specdec.models.views import shallow_copy_as, view

M = TypeVar("M", bound=nn.Module)
StandIn = Callable[[States, Callable[..., Any], dict[str, Any]], Any]


def with_states(model: M) -> M:
    """A view of `model` that shares its weights; `model` itself if no layer has a known token-mixing function."""
    return view(model, _rewired)


def has_states(model: nn.Module) -> bool:
    """Return whether any layer has a known token-mixing function."""
    return any(_rewired(module) is not module for module in model.modules())


def _rewired(module: nn.Module) -> nn.Module:
    kind = _rewired_class(type(module))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
    return module if kind is None else shallow_copy_as(module, kind)


@cache
def _rewired_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """A subclass of `kind` whose methods call replacements of known functions; None if `kind` calls none of them."""
    if kind.__module__.startswith("torch."):
        return None
    methods = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
        for name, method in vars(base).items():
            if not isinstance(method, FunctionType):
                continue
            unwrapped = inspect.unwrap(method)  # transformers wraps methods for offloading
            ours = {f: made for f in unwrapped.__code__.co_names if (made := _stand_in(unwrapped.__globals__.get(f)))}
            if ours:
                code, defaults = unwrapped.__code__, unwrapped.__defaults__
                methods[name] = FunctionType(code, unwrapped.__globals__ | ours, name, defaults, unwrapped.__closure__)
                methods[name].__kwdefaults__ = unwrapped.__kwdefaults__
    return type(kind.__name__, (kind,), methods) if methods else None


def _stand_in(native: Any) -> Callable[..., Any] | None:
    """The replacement for a function; None if the function is not known."""
    if not isinstance(native, FunctionType):
        return None
    signature = inspect.signature(native)
    ours = next((made for parameters, made in STAND_INS if parameters <= set(signature.parameters)), None)
    if ours is None:
        return None

    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = [parameter.name for parameter in parameters]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        states = passing_states()
        if states is None:
            return native(*args, **kwargs)
        return ours(states, native, {**defaults, **dict(zip(names, args, strict=False)), **kwargs})

    return stand_in


def _convolution(states: States, native: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
    def convolution(line: Tensor) -> Tensor:
        return native(**given | {"hidden_states": line})

    return states.convolved(given["hidden_states"], given["weight"].shape[-1], convolution)


def _delta_rule(states: States, native: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Delta rule. query, key (B, T, H, K), value (B, T, H, V), g (B, T, H[, K]), beta (B, T, H); state (B, H, K, V)."""
    before, step = states.before(4), states.step
    if not isinstance(step, Drafted):
        real = step.real(given["key"])
        if real is not None:
            given = given | {"g": _where(real, given["g"]), "beta": _where(real, given["beta"])}
        out, state = native(**given | {"initial_state": before, "output_final_state": True})
        states.after(Recurrence(state, turned=False))
        return out, state
    query, key, value, g, beta = (
        given[name].transpose(1, 2).float() for name in ("query", "key", "value", "g", "beta")
    )  # (B, H, T, ...)
    if given["use_qk_l2norm_in_kernel"]:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    groups = value.shape[1] // key.shape[1]
    if groups > 1:
        query, key = (x.repeat_interleave(groups, 1) for x in (query, key))
    memory = states.memory(lambda state: Recurrence(state, turned=False))
    decay = g[..., None] if g.dim() == 3 else g
    read = memory.read(step, query * query.shape[-1] ** -0.5, key, value, decay, beta[..., None])
    return read.transpose(1, 2).to(given["query"].dtype).contiguous(), memory.state


def _mamba2(states: States, native: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Mamba 2. hidden_states (B, T, H, P), dt (B, T, H), A, D (H,), B, C (B, T, groups, N); state (B, H, P, N)."""
    before, step = states.before(4), states.step
    dt = given["dt"].float()
    if given["dt_bias"] is not None:
        dt = dt + given["dt_bias"].float()
    if given["dt_softplus"]:
        dt = softplus(dt)
    dt = dt.clamp(*given["dt_limit"])
    if not isinstance(step, Drafted):
        real = step.real(dt)
        if real is not None:
            own = {"dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, float("inf"))}
            given = given | own | {"dt": _where(real, dt)}
        out, state = native(**given | {"initial_states": before, "return_final_states": True})
        states.after(Recurrence(state, turned=True))
        return out, state
    x = given["hidden_states"].float()
    key, query = (_per_head(given[name].float(), x.shape[2]) for name in ("B", "C"))  # (B, H, T, N)
    dt = dt.transpose(1, 2)[..., None]  # (B, H, T, 1)
    memory = states.memory(lambda state: Recurrence(state, turned=True))
    decay = given["A"].float()[:, None, None] * dt
    read = memory.read(step, query, key, x.transpose(1, 2) * dt, decay, None).transpose(1, 2).contiguous()
    if given["D"] is not None:
        read = read + given["D"][:, None] * x
    return read, memory.state


def _mamba1(states: States, native: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Mamba 1. hidden_states, dt, z (B, I, T), A (I, S), B, C (B, S, T), D (I,); state (B, I, S)."""
    before, step = states.before(3), states.step
    x, dt, A = given["hidden_states"].float(), given["dt"].float(), given["A"].float()
    if given["delta_bias"] is not None:
        dt = dt + given["delta_bias"].float()[:, None]
    if given["delta_softplus"]:
        dt = softplus(dt)
    dt = dt.transpose(1, 2)  # (B, T, I)
    if not isinstance(step, Drafted):
        real = step.real(dt)
        dt = dt if real is None else _where(real, dt)
        own = {"dt": dt.transpose(1, 2), "delta_bias": None, "delta_softplus": False}
        out, state = native(**given | own | {"z": None, "return_last_state": True})
        if before is not None:  # the model's own starts from zeros: add what C reads from the decayed previous state
            left = (A * dt.cumsum(1)[..., None]).exp() * before[:, None]  # (B, T, I, S)
            out = out + (left @ given["C"].float().transpose(1, 2)[..., None])[..., 0].transpose(1, 2)
            state = state + left[:, -1]
        states.after(Scan(state))
    else:
        memory = states.memory(Scan)
        query = given["C"].float().transpose(1, 2)  # (B, T, S)
        added = (dt * x.transpose(1, 2))[..., None] * given["B"].float().transpose(1, 2)[:, :, None]
        out = memory.read(step, query, (A * dt[..., None]).exp(), added).transpose(1, 2)
        out, state = out if given["D"] is None else out + given["D"][:, None] * x, memory.state
    return out if given["z"] is None else out * silu(given["z"]), state


def _where(real: Tensor, x: Tensor) -> Tensor:
    """x (B, T, ...) with zeros at padding, so that padding neither decays nor updates the state."""
    return torch.where(real[(...,) + (None,) * (x.dim() - 2)], x, 0)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """Expand x (B, T, groups, N) to (B, H, T, N)."""
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], 1)


STAND_INS: tuple[tuple[set[str], StandIn], ...] = (
    ({"query", "key", "value", "g", "beta", "chunk_size", "initial_state", "use_qk_l2norm_in_kernel"}, _delta_rule),
    ({"hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_limit"}, _mamba2),
    ({"hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"}, _mamba1),
    ({"hidden_states", "weight", "bias", "activation"}, _convolution),
)
