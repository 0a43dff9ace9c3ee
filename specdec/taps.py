"""`Taps`: hidden states taken from a model's layers while it runs.

Owns finding the layers and the hooks on them. A tap k is the state *entering* layer k, transformers'
`hidden_states[k]`; tap n of n layers is what the last one puts out, before the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

FINAL = -1  # tap of the state that enters the LM head, after the final norm (EAGLE-1 and 2)


class Taps:
    """Costs the captured layers' tensors and nothing else: no `output_hidden_states`.

    Args:
        model: a decoder-only causal LM. at: taps, in the order in which their states are concatenated.
        device: where the states go; None: where the first one is.
    """

    def __init__(self, model: PreTrainedModel, at: Sequence[int], device: torch.device | None = None):
        layers = decoder_layers(model)
        wrong = [tap for tap in at if not (tap == FINAL or 0 <= tap <= len(layers))]
        if wrong:
            raise ValueError(f"{type(model).__name__} has {len(layers)} layers: there is no tap {wrong[0]}")
        self.model, self.at, self.device = model, tuple(at), device
        self._layers = layers
        self._taken: dict[int, Tensor] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the states of a forward pass run within this context."""
        self._taken = {}
        handles = [self._hook(tap) for tap in set(self.at)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def features(self) -> Tensor:
        """(B, W, C) of the last pass: the taps' states side by side."""
        device = self.device or self._taken[self.at[0]].device
        return torch.cat([self._taken[tap].to(device) for tap in self.at], -1)

    def _hook(self, tap: int) -> Any:
        def keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._taken[tap] = args[0] if args else kwargs["hidden_states"]

        def keep_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._taken[tap] = output if isinstance(output, Tensor) else output[0]

        if tap == FINAL:
            return self.model.get_decoder().register_forward_hook(keep_output)
        if tap == len(self._layers):
            return self._layers[-1].register_forward_hook(keep_output)
        return self._layers[tap].register_forward_pre_hook(keep_input, with_kwargs=True)


def decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The decoder's layers in order, found by `get_decoder()` and the config's number of layers."""
    decoder = model.get_decoder()
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(lists) != 1:
        raise ValueError(f"cannot tell which modules of {type(decoder).__name__} are its {count} layers")
    return list(lists[0])
