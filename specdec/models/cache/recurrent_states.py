"""`States`: recurrent states and convolution windows of a batch's rows, and their rollback.

A draft does not change the states. Its nodes wait, and before the next pass the states advance over the accepted ones,
using what the layers computed for each node (`linear_recurrence`). No weight is read and no second pass is run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.models.cache.buffers import as_column
from specdec.models.cache.convolution_window import Window
from specdec.models.cache.linear_recurrence import Recurrence, Scan
from specdec.models.cache.recurrent_passes import Drafted, Known, Taken

R = TypeVar("R", Recurrence, Scan)
P = TypeVar("P", Window, Recurrence | Scan)
Place = tuple[int, int]  # a layer and the index of its state
Part = tuple[int, int, int]  # also the index of a part of the state: Zamba's layers read one part per head


class States:
    """Recurrent states and convolution windows of B rows.

    As with the cache, call `place_known` or `place_draft` before each pass, and `commit` after a draft.

    Attributes:
        windows: convolution windows by layer and state; empty for a model without them.
        memories: recurrent states by layer, state and part; likewise.
    """

    def __init__(self, batch_size: int):
        self.windows: dict[Place, Window] = {}
        self.memories: dict[Part, Recurrence | Scan] = {}
        self._given: dict[Place, Tensor] = {}  # imported states, whose kind is known once a layer reads them
        self._pass: Known | Drafted = Known([0] * batch_size)
        self._at = [0] * batch_size  # number of tokens that the states include
        self._waiting = [0] * batch_size  # committed nodes that still wait (the first ones), as they may be rolled back
        self._pending = 0  # draft nodes that wait after these
        self._chosen: Tensor | None = None  # (B, D) int64, committed path through the pending nodes
        self._window: Place = (0, 0)  # window that a layer used last
        self._memory: Part = (0, 0, -1)  # recurrent state that a layer read last
        self._before: Tensor | None = None  # value of that state before the pass
        self._dims: dict[Place, int] = {}  # dimensions of states in their layers, one more if they have parts

    @property
    def parts(self) -> list[Window | Recurrence | Scan]:
        """Windows and recurrent states of all layers."""
        return [*self.windows.values(), *self.memories.values()]

    # Called by the cache

    def place_known(self, pads: Sequence[int], count: int, lengths: Sequence[int]) -> None:
        """Begin a pass over `count` tokens per row, of which `pads[b]` are padding; lengths: the rows' before it."""
        self.settle(lengths)
        self._pass = Known(pads)
        self._at = [length + count - pad for length, pad in zip(lengths, pads, strict=True)]

    def place_draft(self, ancestors: Tensor, chain: bool, lengths: Sequence[int], floors: Sequence[int] | None) -> None:
        """Begin a pass over n draft nodes after P pending ones.

        Args:
            ancestors: (B, n, P + n) bool, nodes that each new node sees.
            chain: all nodes form one path in order, in every row.
            lengths: the rows' committed lengths.
            floors: see `SpeculativeCache`.
        """
        if not self.parts:
            return
        if ancestors.shape[1] == ancestors.shape[2]:  # a new draft: the last one has been verified
            self.settle(lengths, floors)
        held = max(self._waiting)
        if held:
            real = torch.arange(held, device=ancestors.device) < as_column(self._waiting, ancestors.device)
            ancestors = torch.cat([real[:, None].expand(-1, ancestors.shape[1], -1), ancestors], -1)
        self._pass = Drafted(ancestors, chain and len(set(self._waiting)) == 1)
        self._pending = ancestors.shape[-1] - held

    def commit(self, source: Tensor | None) -> None:
        """Store the committed path (B, D) int64, see `SpeculativeCache.commit`. The rows' lengths bound it later."""
        self._chosen = source

    def settle(self, lengths: Sequence[int], floors: Sequence[int] | None = None) -> None:
        """Advance the states over the nodes that rows of these lengths have committed, up to the floors.

        Committed nodes after the floor keep waiting. Nodes that were not committed are dropped.
        """
        if not self.parts or not (self._pending or any(self._waiting)):
            return
        counts = [max(0, length - at) for length, at in zip(lengths, self._at, strict=True)]
        floors = lengths if floors is None else floors
        taken = [min(n, max(0, floor - at)) for n, floor, at in zip(counts, floors, self._at, strict=True)]
        if any(counts):
            step = self._taken(taken, max(n - k for n, k in zip(counts, taken, strict=True)))
            for part in self.parts:
                part.take(step)
        else:
            for part in self.parts:
                part.drop()
        self._waiting = [n - k for n, k in zip(counts, taken, strict=True)]
        self._at = [at + k for at, k in zip(self._at, taken, strict=True)]
        self._pending, self._chosen = 0, None

    def _line(self, device: torch.device) -> Tensor | None:
        """Waiting nodes on each row's committed path, (B, D) int64, then arbitrary ones; None if already in order."""
        held = max(self._waiting)
        if self._chosen is None and (held == min(self._waiting) or not self._pending):
            return None
        if self._chosen is None:
            chosen = torch.arange(self._pending, device=device)[None]
        else:
            chosen = self._chosen.to(device)
        chosen = (held + chosen).expand(len(self._waiting), -1)
        own = as_column(self._waiting, device)
        column = torch.arange(held + chosen.shape[1], device=device)
        behind = chosen.gather(1, (column - own).clamp(0, chosen.shape[1] - 1))
        return torch.where(column < own, column, behind)

    def _taken(self, taken: Sequence[int], rest: int) -> Taken:
        """Take the first `taken[b]` waiting nodes of each row's path; at most `rest` nodes keep waiting."""
        device, count = self.parts[0].state.device, max(self._waiting) + self._pending
        line, many = self._line(device), as_column(taken, device)
        column = torch.arange(count, device=device)
        if line is None:
            line, last, nodes = column.expand(len(taken), -1), many[:, 0] - 1, column < many
        else:
            last = torch.where(many > 0, line.gather(1, (many - 1).clamp(min=0)), -1)[:, 0]
            nodes = torch.zeros(len(taken), count + 1, dtype=torch.bool, device=device)
            place = torch.arange(line.shape[1], device=device)
            nodes.scatter_(1, torch.where(place < many, line, count), True)  # the last column is discarded
            nodes = nodes[:, :count]
        waiting = line.gather(1, (many + column[:rest]).clamp(max=line.shape[1] - 1)) if rest else line[:, :0]
        return Taken(nodes, line, last, waiting, idle=not all(taken))

    # Called by layers during a pass

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context in which `passing_states` gives these states to the layers of this thread's pass."""
        token = _passing.set(self)
        try:
            yield
        finally:
            _passing.reset(token)

    def ids(self, place: Place) -> Tensor | None:
        """Last token ids (B, W) of a layer that keeps ids in place of convolution inputs (Qwen4); None for others."""
        window = self.windows.get(place)
        if window is None or window.state.is_floating_point():
            return None
        if isinstance(self._pass, Drafted) and not self._pass.straight:
            raise NotImplementedError(f"layer {place[0]} reads n-grams of tokens, which need a chain, not a tree")
        return window.latest[:, 0]

    def convolve(self, place: Place, inputs: Tensor, width: int) -> Tensor:
        """Return all inputs (B, C, T) of a layer's convolution: earlier ones, then `inputs` (B, C, n) or ids (B, n)."""
        inputs = inputs[:, None] if inputs.dim() == 2 else inputs
        if place not in self.windows:
            self.windows[place] = Window(inputs.new_zeros(*inputs.shape[:2], width))
        self._window = place
        return self.windows[place].read(self._pass, inputs)

    def convolved(self, line: Tensor, width: int, native: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a layer's convolution to the inputs that `convolve` returned.

        Args:
            line: (B, C, T), these inputs.
            width: inputs per output.
            native: the model's own causal convolution.

        Returns:
            (B, C, >= n). The last n columns are the outputs of the new tokens.
        """
        return self.windows[self._window].convolved(self._pass, line, width, native)

    def ask(self, place: Place) -> None:
        """Called when a layer is about to read its recurrent state."""
        self._memory = (*place, -1)

    def updated(self, place: Place, dims: int) -> None:
        """Called when a layer writes its recurrent state. Only its dimensions are used: we computed the value."""
        if self._memory[:2] != place or self._memory[2] < 0:
            raise NotImplementedError(f"layer {place[0]} updates its recurrent state with an unknown function")
        self._given.pop(place, None)
        self._dims[place] = dims

    @property
    def step(self) -> Known | Drafted:
        """Current pass."""
        return self._pass

    def before(self, dims: int) -> Tensor | None:
        """State that the layer starts from, in the model's layout with `dims` dimensions; None for zeros.

        A layer that calls this again gets the next part of its state.
        """
        layer, which, part = self._memory
        self._memory = layer, which, part + 1
        memory, given = self.memories.get(self._memory), self._given.get((layer, which))
        if memory is not None:
            self._before = memory.state
        else:
            self._before = given if given is None or given.dim() == dims else given[:, part + 1]
        return self._before

    def memory(self, kind: Callable[[Tensor], R]) -> R:
        """Return the layer's state as an object of this kind, which can read draft nodes."""
        if self._memory not in self.memories:
            assert self._before is not None
            self.memories[self._memory] = kind(self._before)
        return self.memories[self._memory]  # type: ignore[return-value]

    def after(self, memory: Recurrence | Scan) -> None:
        """Replace the layer's state."""
        self.memories[self._memory] = memory

    # Import and export of states, changes of rows

    def put(self, place: Place, window: Tensor | None, memory: Tensor | None, lengths: Sequence[int]) -> None:
        """Import a layer's states in transformers' layout, of rows of these lengths."""
        self._at = list(lengths)
        if window is not None:
            self.windows[place] = Window(window[:, None] if window.dim() == 2 else window)
        if memory is not None:
            self._given[place] = memory

    def put_layer(self, index: int, layer: Any, lengths: Sequence[int]) -> None:
        """Import all states of a layer of transformers' cache, if it has any."""
        for which in range(getattr(layer, "number_of_states", 0)):
            self.put((index, which), layer.conv_states[which], layer.recurrent_states[which], lengths)

    @property
    def held(self) -> dict[Place, tuple[Tensor | None, Tensor | None]]:
        """Window and recurrent state by layer, in transformers' layout. Call `settle` first."""
        places = dict.fromkeys([*self.windows, *((layer, which) for layer, which, _ in self.memories)])
        return {place: (self._convolved(place), self._whole(place)) for place in places}

    def _convolved(self, place: Place) -> Tensor | None:
        if place not in self.windows:
            return None
        state = self.windows[place].state
        return state if state.is_floating_point() else state[:, 0]

    def _whole(self, place: Place) -> Tensor | None:
        parts = [memory.state for part, memory in self.memories.items() if part[:2] == place]
        if not parts:
            return None
        return torch.stack(parts, 1) if self._dims.get(place) == parts[0].dim() + 1 else parts[0]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows. Call `settle` first."""
        self._at = [self._at[row] for row in rows]
        self._waiting = [0] * len(rows)
        for part in self.parts:
            part.state = part.state[list(rows)]

    def adopt(self, row: int, other: States, source: int = 0) -> None:
        """Replace row `row` with row `source` of `other`. Call `settle` on both first."""
        self._at[row] = other._at[source]
        for place, window in other.windows.items():
            if place not in self.windows:
                self.windows[place] = _zeros_like(window, len(self._at))
            self.windows[place].state[row] = window.state[source]
        self._dims |= other._dims
        for part, memory in other.memories.items():
            if part not in self.memories:
                self.memories[part] = _zeros_like(memory, len(self._at))
            self.memories[part].state[row] = memory.state[source]

    @property
    def nbytes(self) -> int:
        """Bytes of the states, without waiting nodes."""
        return sum(part.state.nbytes for part in self.parts)


_passing: ContextVar[States | None] = ContextVar("passing", default=None)


def passing_states() -> States | None:
    """States of the pass that this thread is running, or None."""
    return _passing.get()


def _zeros_like(part: P, batch_size: int) -> P:
    """A part of the same kind with zero states of `batch_size` rows; `part` has no waiting nodes."""
    other = copy.copy(part)
    other.state = part.state.new_zeros(batch_size, *part.state.shape[1:])
    return other
