"""`States`: what the layers of a batch's rows carry besides keys and values, and how it is rolled back.

Owns recurrent states and the windows of causal convolutions, by layer, behind the cache's interface. A draft leaves
them as they were: its nodes wait, and those that turn out accepted are taken in before the next pass, by arithmetic on
what the layers computed for them. No weight is read, and no second pass of the model is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from specdec.models.cache.linear_recurrence import Recurrence, Scan, Sees, Taken, Window, paths, slid

R = TypeVar("R", Recurrence, Scan)
Place = tuple[int, int]  # a layer, and which of its states
Part = tuple[int, int, int]  # and which part of that one: Zamba's layers read theirs in a call for each head


@dataclass(frozen=True)
class Known:
    """A pass over n known tokens, row b's first `pads[b]` being padding, which must not touch a state."""

    pads: Sequence[int]

    def real(self, x: Tensor) -> Tensor | None:
        """(B, T) bool, for x (B, T, ...); None where all is."""
        if not any(self.pads):
            return None
        return torch.arange(x.shape[1], device=x.device) >= _column(self.pads, x.device)

    def turned(self, x: Tensor, back: bool = False) -> Tensor:
        """x (B, C, T) with padding last; `back`: with what was last, as many columns, first again."""
        pads = _column(self.pads, x.device)
        return _in_order(x, (torch.arange(x.shape[-1], device=x.device) + (-pads if back else pads)) % x.shape[-1])


@dataclass(frozen=True)
class Drafted:
    """A pass over n nodes of a draft behind M that are waiting.

    Attributes:
        nodes: (B, n, M + n) bool, what each sees. before: M. straight: all nodes form one path in order, in each row.
    """

    nodes: Tensor
    before: int
    straight: bool

    @cached_property
    def sees(self) -> Sees:
        if not self.before:
            return Sees(self.nodes, None)
        seen = self.nodes[..., : self.before] * torch.arange(1, self.before + 1, device=self.nodes.device)
        return Sees(self.nodes, seen.amax(-1) - 1)


class States:
    """The states of B rows: `place_known` or `place_draft` before each pass, `commit` after a draft, as the cache.

    Attributes:
        windows, memories: by layer and which of its states, and parts of these. Empty for a model that has none.
    """

    def __init__(self, batch_size: int):
        self.windows: dict[Place, Window] = {}
        self.memories: dict[Part, Recurrence | Scan] = {}
        self._given: dict[Place, Tensor] = {}  # states whose kind is known once a layer reads them
        self._pass: Known | Drafted = Known([0] * batch_size)
        self._at = [0] * batch_size  # the position behind what the states have taken in
        self._behind = [0] * batch_size  # committed nodes that wait, the first ones: they may be rolled back
        self._pending = 0  # nodes behind them
        self._chosen: Tensor | None = None  # (B, D) int64, of these, which are committed
        self._window: Place = (0, 0)  # which a layer has asked for last
        self._memory: Part = (0, 0, -1)
        self._before: Tensor | None = None  # what that one begins with
        self._dims: dict[Place, int] = {}  # of states as their layers have them: one more where they have parts

    @property
    def parts(self) -> list[Window | Recurrence | Scan]:
        """Of all layers."""
        return [*self.windows.values(), *self.memories.values()]

    # What the cache does

    def place_known(self, pads: Sequence[int], count: int, lengths: Sequence[int]) -> None:
        """`count` tokens per row, of which `pads[b]` are padding; lengths: the rows' before them."""
        self.settle(lengths)
        self._pass = Known(pads)
        self._at = [length + count - pad for length, pad in zip(lengths, pads, strict=True)]

    def place_draft(self, ancestors: Tensor, chain: bool, lengths: Sequence[int], floors: Sequence[int] | None) -> None:
        """ancestors: (B, n, P + n) bool, over the P nodes pending and n new ones. floors: see `SpeculativeCache`."""
        if not self.parts:
            return
        if ancestors.shape[1] == ancestors.shape[2]:  # a new draft: what became of the last one is known
            self.settle(lengths, floors)
        held = max(self._behind)
        if held:
            real = torch.arange(held, device=ancestors.device) < _column(self._behind, ancestors.device)
            ancestors = torch.cat([real[:, None].expand(-1, ancestors.shape[1], -1), ancestors], -1)
        before = held + self._pending
        self._pass = Drafted(ancestors, before, chain and len(set(self._behind)) == 1)
        self._pending = ancestors.shape[-1] - held

    def commit(self, source: Tensor | None) -> None:
        """source: (B, D) int64, see `SpeculativeCache.commit`. How far it counts is told by the rows' lengths."""
        self._chosen = source

    def settle(self, lengths: Sequence[int], floors: Sequence[int] | None = None) -> None:
        """Take in what the rows of these lengths have committed, up to the floors; what they have not is forgotten."""
        if not self.parts or not (self._pending or any(self._behind)):
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
        self._behind = [n - k for n, k in zip(counts, taken, strict=True)]
        self._at = [at + k for at, k in zip(self._at, taken, strict=True)]
        self._pending, self._chosen = 0, None

    def _line(self, device: torch.device) -> Tensor | None:
        """(B, D) int64: the waiting nodes on each row's committed path, in order; behind its end, any. None: as they
        lie."""
        held = max(self._behind)
        if self._chosen is None and (held == min(self._behind) or not self._pending):
            return None
        if self._chosen is None:
            chosen = torch.arange(self._pending, device=device)[None]
        else:
            chosen = self._chosen.to(device)
        chosen = (held + chosen).expand(len(self._behind), -1)
        own = _column(self._behind, device)
        column = torch.arange(held + chosen.shape[1], device=device)
        behind = chosen.gather(1, (column - own).clamp(0, chosen.shape[1] - 1))
        return torch.where(column < own, column, behind)

    def _taken(self, taken: Sequence[int], rest: int) -> Taken:
        """As many of each row's waiting nodes, of which `rest` at most go on waiting then."""
        device, count = self.parts[0].state.device, max(self._behind) + self._pending
        line, many = self._line(device), _column(taken, device)
        column = torch.arange(count, device=device)
        if line is None:
            line, last, nodes = column.expand(len(taken), -1), many[:, 0] - 1, column < many
        else:
            last = torch.where(many > 0, line.gather(1, (many - 1).clamp(min=0)), -1)[:, 0]
            nodes = torch.zeros(len(taken), count + 1, dtype=torch.bool, device=device)
            place = torch.arange(line.shape[1], device=device)
            nodes.scatter_(1, torch.where(place < many, line, count), True)  # the last column takes what is not taken
            nodes = nodes[:, :count]
        waiting = line.gather(1, (many + column[:rest]).clamp(max=line.shape[1] - 1)) if rest else line[:, :0]
        return Taken(nodes, line, last, waiting, idle=not all(taken))

    # What layers do, in a pass

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within this context the layers of a pass that this thread runs find these states by `passing_states`."""
        token = _passing.set(self)
        try:
            yield
        finally:
            _passing.reset(token)

    def ids(self, place: Place) -> Tensor | None:
        """(B, W): the last tokens, if that is what a layer keeps as if it were going to convolve them (Qwen4)."""
        window = self.windows.get(place)
        if window is None or window.state.is_floating_point():
            return None
        if isinstance(self._pass, Drafted) and not self._pass.straight:
            raise NotImplementedError(f"layer {place[0]} reads n-grams of tokens, which follow no tree")
        return window.latest[:, 0]

    def convolve(self, place: Place, inputs: Tensor, width: int) -> Tensor:
        """What a layer's convolution goes over, (B, C, T): `inputs` (B, C, n), or ids (B, n), behind what came before
        them."""
        inputs = inputs[:, None] if inputs.dim() == 2 else inputs
        if place not in self.windows:
            self.windows[place] = Window(inputs.new_zeros(*inputs.shape[:2], width))
        self._window, window = place, self.windows[place]
        if isinstance(self._pass, Drafted):
            return window.extend(inputs)
        n = inputs.shape[-1]
        if not any(self._pass.pads):
            line = torch.cat([window.state, inputs], -1)
            window.state = line[..., n:].contiguous()
            return line
        line = torch.cat([window.state, self._pass.turned(inputs)], -1)
        window.state = slid(line, n - _column(self._pass.pads, line.device)[:, 0], window.state.shape[-1])
        return line

    def convolved(self, line: Tensor, width: int, native: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, C, >= n), the last n columns of which are the new tokens': the line of `convolve`, convolved.

        Args:
            width: inputs that each output is made of. native: the model's own causal convolution.
        """
        step = self._pass
        if isinstance(step, Known):
            if not any(step.pads):
                return native(line)
            n = line.shape[-1] - self.windows[self._window].state.shape[-1]
            return step.turned(native(line)[..., -n:], back=True)
        if step.straight:
            return native(line)
        # Each node's own inputs side by side: of what the model's function gives, every K-th column is wanted.
        index = paths(step.nodes, self.windows[self._window].state.shape[-1], width).flatten(1)  # (B, n * K)
        return native(_in_order(line, index))[..., width - 1 :: width]

    def ask(self, place: Place) -> None:
        """A layer is about to read its recurrent state."""
        self._memory = (*place, -1)

    def updated(self, place: Place, dims: int) -> None:
        """A layer says that it has read its recurrent state, and what it is now, which is known here already."""
        if self._memory[:2] != place or self._memory[2] < 0:
            raise NotImplementedError(f"layer {place[0]} updates its recurrent state in a way of its own")
        self._given.pop(place, None)
        self._dims[place] = dims

    @property
    def step(self) -> Known | Drafted:
        """The present pass."""
        return self._pass

    def before(self, dims: int) -> Tensor | None:
        """The state that the layer starts from, in the model's own shape, of `dims` dimensions; None for zeros. The
        next part of it, where the layer has asked once and reads again."""
        layer, which, part = self._memory
        self._memory = layer, which, part + 1
        memory, given = self.memories.get(self._memory), self._given.get((layer, which))
        if memory is not None:
            self._before = memory.state
        else:
            self._before = given if given is None or given.dim() == dims else given[:, part + 1]
        return self._before

    def memory(self, kind: Callable[[Tensor], R]) -> R:
        """The layer's state, of this kind, which a draft's nodes can be read from."""
        if self._memory not in self.memories:
            assert self._before is not None
            self.memories[self._memory] = kind(self._before)
        return self.memories[self._memory]  # type: ignore[return-value]

    def after(self, memory: Recurrence | Scan) -> None:
        """The layer's state is this one's from now on."""
        self.memories[self._memory] = memory

    # Rows, and states from elsewhere

    def put(self, place: Place, window: Tensor | None, memory: Tensor | None, lengths: Sequence[int]) -> None:
        """Begin with a layer's states as transformers has them, of rows of these lengths."""
        self._at = list(lengths)
        if window is not None:
            self.windows[place] = Window(window[:, None] if window.dim() == 2 else window)
        if memory is not None:
            self._given[place] = memory

    @property
    def held(self) -> dict[Place, tuple[Tensor | None, Tensor | None]]:
        """Window and recurrent state by layer, as transformers has them; `settle` has been called."""
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
        """Go on with these rows alone; `settle` has been called."""
        self._at = [self._at[row] for row in rows]
        self._behind = [0] * len(rows)
        for part in self.parts:
            part.state = part.state[list(rows)]

    def adopt(self, row: int, other: States) -> None:
        """Put the one row of `other` in the place of `row`; both are settled."""
        self._at[row] = other._at[0]
        for place, window in other.windows.items():
            if place not in self.windows:
                self.windows[place] = window.empty(len(self._at))
            self.windows[place].state[row] = window.state[0]
        self._dims |= other._dims
        for part, memory in other.memories.items():
            if part not in self.memories:
                self.memories[part] = memory.empty(len(self._at))
            self.memories[part].state[row] = memory.state[0]

    @property
    def nbytes(self) -> int:
        """Of the states, drafts not counted."""
        return sum(part.state.nbytes for part in self.parts)


_passing: ContextVar[States | None] = ContextVar("passing", default=None)


def passing_states() -> States | None:
    """Those of the pass that this thread is running, or None."""
    return _passing.get()


def _column(numbers: Sequence[int], device: torch.device | None) -> Tensor:
    return torch.tensor(list(numbers), device=device)[:, None]


def _in_order(line: Tensor, columns: Tensor) -> Tensor:
    return line.gather(2, columns[:, None].expand(-1, line.shape[1], -1))
