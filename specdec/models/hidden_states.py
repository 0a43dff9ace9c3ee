"""`Taps`: hidden states of a model's layers, captured by hooks during a forward pass.

Tap k is the state *entering* layer k, transformers' `hidden_states[k]`. Tap n of n layers is the output of the last
layer, before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import ismethod
from itertools import count
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.introspection import decoder_layers

# The listening `Taps`' key and its states so far, for each thread: passes of other threads are not captured.
_listener: ContextVar[tuple[int, dict[int, Tensor]] | None] = ContextVar("listener", default=None)
_traced: tuple[int, dict[int, Tensor]] | None = None  # the same while `torch.compile` traces: it supports no ContextVar
_keys = count()
FINAL = -1  # tap of the state that enters the LM head, after the final norm (EAGLE-1 and 2)


class Taps:
    """Captures the hidden states of some layers, without the memory that `output_hidden_states` needs for all layers.

    The hooks stay on the model's layers as long as this object exists, and do nothing outside of `listening`.

    Args:
        model: a decoder-only causal LM.
        at: taps, in the order in which their states are concatenated.
        device: device of the features; None: that of the first state.

    Raises:
        ValueError: the model has fewer layers than a tap needs.

    Example:
        ```python
        taps = Taps(model, at=(2, 14, 25))
        with taps.listening() as taken:
            model(input_ids)
        features = taps.features(taken)  # (B, T, 3 * hidden_size)
        ```
    """

    def __init__(self, model: PreTrainedModel, at: Sequence[int], device: torch.device | None = None):
        layers = decoder_layers(model)
        wrong = [tap for tap in at if not (tap == FINAL or 0 <= tap <= len(layers))]
        if wrong:
            raise ValueError(f"{type(model).__name__} has {len(layers)} layers: there is no tap {wrong[0]}")
        self.at, self.device = tuple(at), device
        self._key = next(_keys)
        handles = [_hook(model, layers, tap, self._key) for tap in sorted(set(self.at))]
        finalize(self, _remove, handles)

    @contextmanager
    def listening(self) -> Iterator[dict[int, Tensor]]:
        """Capture the states of a forward pass that this thread runs within the context: (B, W, H) by tap."""
        taken: dict[int, Tensor] = {}
        if torch.compiler.is_compiling():
            _trace((self._key, taken))
            yield taken
            _trace(None)
            return
        before = _listener.set((self._key, taken))
        try:
            yield taken
        finally:
            _listener.reset(before)

    def features(self, taken: dict[int, Tensor]) -> Tensor:
        """(B, W, C), the concatenated states of the taps. taken: the states from `listening`."""
        device = self.device or taken[self.at[0]].device
        return torch.cat([taken[tap].to(device) for tap in self.at], -1)


def foreign_code(module: nn.Module) -> tuple[Reference, ...]:
    """References to a module's foreign hooks and to a replaced forward pass."""
    replaced = vars(module).get("forward")
    return tuple(map(Reference, [*foreign_hooks(module), *([] if replaced is None else [replaced])]))


class Reference:
    """A function or method, which is not kept alive. It equals another reference to the same one."""

    def __init__(self, function: Any):
        parts = (function.__self__, function.__func__) if ismethod(function) else (function,)
        self._parts = tuple(map(_weakly, parts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reference) or len(other._parts) != len(self._parts):
            return False
        return all(mine() is not None and mine() is its() for mine, its in zip(self._parts, other._parts, strict=True))

    __hash__ = None  # type: ignore[assignment]


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return ref(value)
    except TypeError:  # of a kind to which there are no references
        return lambda: value


def foreign_hooks(module: nn.Module) -> list[Any]:
    """The forward hooks of a module that are not a `Taps`', and may do anything."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if getattr(hook, "func", None) not in (_keep_input, _keep_output)]


def _trace(listener: tuple[int, dict[int, Tensor]] | None) -> None:
    global _traced
    _traced = listener


def _hook(model: PreTrainedModel, layers: Sequence[nn.Module], tap: int, key: int) -> Any:
    """Register a tap's hook. It refers to its `Taps` by key, so that they can be freed and the model be pickled."""
    if tap == FINAL:
        return model.get_decoder().register_forward_hook(partial(_keep_output, tap, key))
    if tap == len(layers):
        return layers[-1].register_forward_hook(partial(_keep_output, tap, key))
    return layers[tap].register_forward_pre_hook(partial(_keep_input, tap, key), with_kwargs=True)


def _keep_input(
    tap: int, key: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> None:
    """Keep a layer's input. Torch passes no kwargs if garbage collection has just removed the hook: do nothing then."""
    if kwargs is not None:
        _keep(tap, key, args[0] if args else kwargs["hidden_states"])


def _keep_output(tap: int, key: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _keep(tap, key, output if isinstance(output, Tensor) else output[0])


def _keep(tap: int, key: int, state: Tensor) -> None:
    listener = _traced if torch.compiler.is_compiling() else _listener.get()
    if listener is not None and listener[0] == key:
        listener[1][tap] = state


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
