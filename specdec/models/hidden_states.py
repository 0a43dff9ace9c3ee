"""`Taps`: hidden states taken from a model's layers while it runs.

Owns finding the layers and the hooks on them. A tap k is the state *entering* layer k, transformers'
`hidden_states[k]`; tap n of n layers is what the last one puts out, before the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.introspection import decoder_layers

# Who is running a pass in this thread, and what it took so far: another thread's pass is none of its business.
_listener: ContextVar[tuple[int, dict[int, Tensor]] | None] = ContextVar("listener", default=None)
_traced: tuple[int, dict[int, Tensor]] | None = None  # while `torch.compile` traces, which takes no ContextVar
_keys = count()
FINAL = -1  # tap of the state that enters the LM head, after the final norm (EAGLE-1 and 2)


class Taps:
    """Costs the captured layers' tensors and nothing else: no `output_hidden_states`.

    The hooks stay on the model's layers for as long as this object lives, and do nothing outside of `listening`.

    Args:
        model: a decoder-only causal LM. at: taps, in the order in which their states are concatenated.
        device: where the states go; None: where the first one is.
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
        """Take the states of a forward pass that this thread runs within the context: (B, W, H) by tap."""
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
        """(B, W, C): the taps' states side by side. taken: what `listening` gave."""
        device = self.device or taken[self.at[0]].device
        return torch.cat([taken[tap].to(device) for tap in self.at], -1)


def _trace(listener: tuple[int, dict[int, Tensor]] | None) -> None:
    global _traced
    _traced = listener


def _hook(model: PreTrainedModel, layers: Sequence[nn.Module], tap: int, key: int) -> Any:
    """Knows the taps by their key alone, so that they can go when nobody holds them; a model is pickled with it."""
    if tap == FINAL:
        return model.get_decoder().register_forward_hook(partial(_keep_output, tap, key))
    if tap == len(layers):
        return layers[-1].register_forward_hook(partial(_keep_output, tap, key))
    return layers[tap].register_forward_pre_hook(partial(_keep_input, tap, key), with_kwargs=True)


def _keep_input(
    tap: int, key: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> None:
    """Without kwargs: the hook was taken away between torch's listing of the layer's hooks and this call, as garbage
    collection may. Nobody listens then."""
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
