"""Linear layers that multiply few rows by the kernels of `kernels.few_rows`: `FewRowsLinear`, `stand_ins`, `gated_by`.

Passes over more rows, and tensors that the kernels do not take, run torch's products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from specdec.models.kernels.few_rows import GATE, QKV, TILES, joined_gate, joined_linear, takes
from specdec.models.linear import is_plain


def joinable(*layers: nn.Module) -> bool:
    """Return whether these are linear layers without hooks, whose products only read their weights and biases."""
    return all(
        is_plain(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        and (layer.bias is None) == (layers[0].bias is None)
        for layer in layers
    )


class FewRowsLinear(nn.Linear):
    """A linear layer with a kernel for few rows. use: its key in `TILES`."""

    use: str

    def forward(self, x: Tensor) -> Tensor:
        weights, biases = parameters(self)
        if not takes(x, weights, biases):
            return super().forward(x)
        (result,) = joined_linear(x.reshape(-1, x.shape[-1]), weights, biases, TILES[self.use])
        return result.view(*x.shape[:-1], -1)


def stand_ins(*layers: nn.Linear) -> list[Callable[[Tensor], Tensor]]:
    """Functions for one pass that give the products of layers.

    The first that is called computes the products of all layers in one kernel, and the others return theirs if they get
    the same tensor.
    """
    joined = _Joined(layers)
    return [partial(joined.product, index) for index in range(len(layers))]


class _Joined:
    def __init__(self, layers: Sequence[nn.Linear]):
        self._layers = layers
        self._given: Tensor | None = None
        self._results: tuple[Tensor, ...] = ()

    def product(self, index: int, x: Tensor) -> Tensor:
        if x is not self._given:
            weights, biases = parameters(*self._layers)
            if not takes(x, weights, biases):
                return self._layers[index](x)
            self._results = joined_linear(x.reshape(-1, x.shape[-1]), weights, biases, TILES[QKV])
            self._given = x
        return self._results[index].view(*x.shape[:-1], -1)


def gated_by(x: Tensor, gate: Any, up: Any, activation: int) -> Tensor | None:
    """The activation of one product times the other, see `joined_gate`; None if the kernel does not take x."""
    weights, biases = parameters(gate, up)
    if not takes(x, weights, biases) or gate.weight.shape != up.weight.shape:
        return None
    result = joined_gate(x.reshape(-1, x.shape[-1]), gate.weight, up.weight, activation, biases, TILES[GATE])
    return result.view(*x.shape[:-1], -1)


def parameters(*layers: nn.Linear) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases; no biases if the layers have none."""
    return [layer.weight for layer in layers], [layer.bias for layer in layers if layer.bias is not None]
