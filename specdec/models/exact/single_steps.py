"""`by_single_steps`: a recurrent layer that runs each draft node alone, by the model's own code.

Plain decoding updates its states by other functions for one token than for several. Only the linear layers that read
the layer's input run all nodes together: their weights are then read once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from specdec.models.cache.kv_cache import SpeculativeCache
from specdec.models.cache.recurrent_passes import Drafted
from specdec.models.cache.stepped_states import SteppedStates
from specdec.models.compat import fill_recurrent_layer
from specdec.models.exact.draft_pass import DraftPass
from specdec.models.exact.node_by_node import joined, part_of
from specdec.models.views import shallow_copy_as, view

UPDATES = {"update_conv_state", "update_recurrent_state"}  # of a cache


@dataclass
class _Step:
    """The step of a layer that is running.

    Attributes:
        whole: input (B, n, H) of the layer at all nodes.
        part: input (B, 1, H) at the node of this step.
        node: its number.
        products: outputs (B, n, out) of linear layers for the whole input.
    """

    whole: Tensor | None = None
    part: Tensor | None = None
    node: int = 0
    products: dict[nn.Module, Tensor] = field(default_factory=dict)


class StepCache(Cache):
    """Cache of one recurrent layer, for a step over one token.

    Args:
        states: convolution window and recurrent state (B, ...) by index; None where there is none. They are copied.
    """

    def __init__(self, states: Sequence[Sequence[Tensor | None]]):
        layer = self._layer = LinearAttentionLayer(len(states))
        for which, (window, memory) in enumerate(states):
            fill_recurrent_layer(layer, which, window, memory)
        super().__init__(layers=_Same([layer]))

    @property
    def states(self) -> list[tuple[Tensor, Tensor]]:
        """The states now."""
        layer = self._layer
        return [(layer.conv_states[i], layer.recurrent_states[i]) for i in range(layer.number_of_states)]


class _Same(list[LinearAttentionLayer]):
    """A list of one layer that returns it for any index."""

    def __getitem__(self, index: object) -> LinearAttentionLayer:
        return super().__getitem__(0)


def has_recurrent_layers(model: nn.Module) -> bool:
    """Return whether any layer updates recurrent states of a cache."""
    return any(_is_recurrent(type(module)) for module in model.modules())  # type: ignore[arg-type]  # hashable


def by_single_steps(module: nn.Module, draft: DraftPass) -> nn.Module:
    """A copy of a recurrent layer that runs each node alone; `module` itself if it is none."""
    if not _is_recurrent(type(module)):  # type: ignore[arg-type]  # a class is hashable
        return module
    step = _Step()

    def swap(part: nn.Module) -> nn.Module:
        if not isinstance(part, nn.Linear):
            return part
        linear: Any = shallow_copy_as(part, _reading_ahead(type(part)))  # type: ignore[arg-type]
        linear._step = step
        return linear

    made: Any = shallow_copy_as(module, _stepping(type(module)))  # type: ignore[arg-type]
    made._modules = {name: part and view(part, swap) for name, part in module._modules.items()}
    made._draft_pass, made._step = draft, step
    return made


@functools.cache
def _is_recurrent(kind: type[nn.Module]) -> bool:
    own = [member for base in kind.__mro__ if base is not nn.Module for member in vars(base).values()]
    return any(UPDATES & {*unwrap(each).__code__.co_names} for each in own if isinstance(each, FunctionType))


@functools.cache
def _stepping(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        given = next((each for each in values if isinstance(each, SpeculativeCache)), None)
        if given is None or not isinstance(given.states.step, Drafted):
            return kind.forward(self, *args, **kwargs)
        states, step = given.states, self._step
        assert isinstance(states, SteppedStates)
        whole = next(each for each in values if isinstance(each, Tensor))
        vars(step).update(vars(_Step(whole)))
        results = []
        for node in range(whole.shape[1]):
            cache = StepCache(states.states_before(self.layer_idx, node))
            step.node, step.part = node, part_of(whole, node, whole.shape[1])
            own = {id(given): cache, id(whole): step.part}

            def part(value: Any, node: int = node, own: dict[int, Any] = own) -> Any:
                return own[id(value)] if id(value) in own else part_of(value, node, whole.shape[1])

            results.append(kind.forward(self, *map(part, args), **{name: part(each) for name, each in kwargs.items()}))
            states.wait(self.layer_idx, cache.states)
        vars(step).update(vars(_Step()))
        return joined(results)

    return type(kind.__name__, (kind,), {"forward": forward})


@functools.cache
def _reading_ahead(kind: type[nn.Linear]) -> type[nn.Linear]:
    """A linear layer that multiplies its layer's whole input at the first node, if it reads it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        step: _Step = self._step
        if x is not step.part or step.whole is None:
            return kind.forward(self, x)
        if self not in step.products:
            step.products[self] = kind.forward(self, step.whole)
        return part_of(step.products[self], step.node, step.whole.shape[1])

    return type(kind.__name__, (kind,), {"forward": forward})
