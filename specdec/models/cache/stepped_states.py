"""`SteppedStates`: recurrent states whose layers run each draft node alone, from the state after its parent.

Needed where each node must have the bits of a pass over it alone. `States` needs no state per node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.models.cache.recurrent_passes import Drafted, Taken
from specdec.models.cache.recurrent_states import Place, States


class NodeState:
    """A convolution window or recurrent state (B, ...) in transformers' layout, and those after its waiting nodes."""

    def __init__(self, state: Tensor):
        self.state = state
        self.drop()

    def drop(self) -> None:
        """Drop all waiting nodes."""
        self._nodes: list[Tensor] = []  # (B, ...) after each waiting node

    def after(self, nodes: Sequence[int]) -> Tensor:
        """State (B, ...) of each row after its node of these, -1: before all nodes. It must not be written to."""
        states = [self.state if node < 0 else self._nodes[node] for node in nodes]
        if len(set(nodes)) == 1:
            return states[0]
        return torch.stack([state[row] for row, state in enumerate(states)])

    def wait(self, state: Tensor) -> None:
        """Add the state (B, ...) after the next node."""
        self._nodes.append(state)

    def take(self, taken: Taken) -> None:
        """Advance over the nodes that are taken; keep those that keep waiting."""
        state, waiting = self.after(taken.last.tolist()), [self.after(nodes) for nodes in taken.waiting.T.tolist()]
        self.state, self._nodes = state, waiting


class SteppedStates(States):
    """States that the model's own code updates token by token. They are imported with `put` before any draft.

    Attributes:
        nodes: convolution window and recurrent state by layer and index; None where the layer has no such state.
    """

    def __init__(self, batch_size: int):
        super().__init__(batch_size)
        self.nodes: dict[Place, tuple[NodeState | None, NodeState | None]] = {}

    @property
    def parts(self) -> list[NodeState]:  # type: ignore[override]
        return [part for pair in self.nodes.values() for part in pair if part is not None]

    def put(self, place: Place, window: Tensor | None, memory: Tensor | None, lengths: Sequence[int]) -> None:
        self._at = list(lengths)
        if any(state is not None and not state.is_floating_point() for state in (window, memory)):
            raise NotImplementedError(f"layer {place[0]} keeps tokens as its state, which is not run node by node")
        states = [None if state is None else NodeState(state) for state in (window, memory)]
        self.nodes[place] = states[0], states[1]

    @property
    def held(self) -> dict[Place, tuple[Tensor | None, Tensor | None]]:
        return {place: (_state(window), _state(memory)) for place, (window, memory) in self.nodes.items()}

    def states_before(self, layer: int, node: int) -> list[list[Tensor | None]]:
        """A layer's states before a node of the current pass: window and recurrent state by index."""
        assert isinstance(self.step, Drafted)
        parents = self.step.parents[node]
        return [[None if part is None else part.after(parents) for part in pair] for pair in self._of(layer)]

    def wait(self, layer: int, after: Sequence[Sequence[Tensor]]) -> None:
        """Keep a layer's states after the next node, which waits."""
        for pair, states in zip(self._of(layer), after, strict=True):
            for part, state in zip(pair, states, strict=True):
                if part is not None:
                    part.wait(state)

    def _of(self, layer: int) -> list[tuple[NodeState | None, NodeState | None]]:
        return [pair for place, pair in self.nodes.items() if place[0] == layer]


def _state(part: NodeState | None) -> Tensor | None:
    return None if part is None else part.state
