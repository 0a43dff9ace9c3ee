"""`Slots`: the KV buffers of layers with the same attention span, and the slot of each token in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.utils.device_copies import uploaded

SPARE = 64  # extra slots allocated when buffers grow, or a sixteenth of the slots if that is more
FEWEST = 512  # minimum slots of a buffer whose size is a power of two
NEVER = 2**62  # position reported for an empty slot: no token sees it


@dataclass(frozen=True)
class Span:
    """Attention span of a kind of layers.

    Attributes:
        window: number of tokens that a token sees, including itself; None: all before it.
        chunked: a token sees its own chunk of `window` positions, not the last `window` tokens.
    """

    window: int | None = None
    chunked: bool = False


def slots_of_size(count: int) -> int:
    """Round a number of slots up to a power of two, so that buffers have few sizes and rarely need to grow."""
    return max(FEWEST, 1 << (count - 1).bit_length())


class Slots:
    """KV buffers of all layers of one kind, and the slots that the current pass writes.

    Position p lies in slot p modulo `count`. With a sliding window, `count` is the window plus the tokens that may be
    rolled back. A draft then only overwrites positions that no token after the row can see.

    Args:
        window: number of tokens that a token sees, including itself; None: all before it.
        sized: see `SpeculativeCache`.
    """

    def __init__(self, window: int | None, sized: bool = False):
        self.window, self.sized = window, sized
        self.count = 0
        self.part = slice(None)  # of the placed tokens, those that the pass runs
        self._slots: dict[torch.device, tuple[Tensor, slice, Tensor]] = {}
        self.buffers: dict[int, list[Tensor]] = {}  # keys and values by layer, (B, heads, count, dim) each
        self.indexed: dict[int, list[Tensor]] = {}  # indexer keys by layer, one (B, 1, count, D) each
        self._spare = SPARE if window is None else min(SPARE, max(8, window // 16))

    def place(
        self,
        lengths: Sequence[int],
        base: Tensor,
        ahead: int,
        pending: int,
        order: Tensor | None,
        pads: Sequence[int],
        count: int,
        draft: bool,
    ) -> None:
        """Set the slots of the next pass, see `SpeculativeCache.place`; ahead: tokens that a row may be rolled back."""
        self._lengths, self._pending, self._order, self._pads, self._n = lengths, pending, order, pads, count
        self._base, self._slots, self.part = base, {}, slice(None)
        end = max(lengths) + pending + count
        # A long prefill is not stored whole: its tokens see one another outside the buffer, which keeps the last ones.
        self._passing = not draft and self.window is not None and count > self._spare
        needed = end
        if self.window is not None:
            loose = self._spare if self._passing else max(self._spare, ahead + pending + count)
            needed = min(end, self.window - 1 + loose)
        if needed > self.count:
            self._resize(self._roomy(needed))
        self._end = self.count if self.sized and draft else min(end, self.count)

    def reserve(self, lengths: Sequence[int], more: int, end: int) -> None:
        self._lengths, self._pending = lengths, 0
        needed = max(max(lengths) + more, end)
        if self.window is not None:
            needed = min(needed, self.window - 1 + max(self._spare, more))
        if needed > self.count:
            self._resize(self._roomy(needed))

    def _roomy(self, needed: int) -> int:
        """Number of slots to allocate when `needed` are needed."""
        if self.sized:
            return slots_of_size(needed)
        roomy = needed + max(SPARE, needed // 16)
        return roomy if self.window is None else min(roomy, max(needed, self.window - 1 + self._spare))

    def pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the whole key and value buffers of a layer."""
        keys, values = self.buffers[layer]
        return keys, values

    def committed(self, layer: int, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """See `SpeculativeCache.committed`."""
        keys, values = self.pair(layer)
        return keys, values, self._positions(as_column(lengths, keys.device))

    def slots(self, device: torch.device) -> Tensor:
        """Slots (B, n) int64 that this pass writes."""
        assert self._order is not None
        return self._placed(self._order, device)[2][:, self.part]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.buffers:
            # Zeros, not garbage: a masked slot still enters attention as 0 * value, and 0 * NaN is NaN.
            self.buffers[layer] = [s.new_zeros(*s.shape[:2], self.count, s.shape[3]) for s in (keys, values)]
        put = self._pass_by if self._passing else self._store
        kept_keys, kept_values = self.buffers[layer]
        return put(kept_keys, keys), put(kept_values, values)

    def write_indexed(self, layer: int, states: Tensor) -> Tensor:
        if layer not in self.indexed:
            self.indexed[layer] = [states.new_zeros(*states.shape[:2], self.count, states.shape[3])]
        return (self._pass_by if self._passing else self._store)(self.indexed[layer][0], states)

    @property
    def all_buffers(self) -> list[list[Tensor]]:
        """Buffers of all layers, in lists in which they can be replaced."""
        return [*self.buffers.values(), *self.indexed.values()]

    def _store(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write `states` to their slots; return the part of the buffer that attention sees."""
        first = (self._lengths[0] + self._pending) % self.count
        if self._order is not None:
            rows, dims, slots = self._placed(self._order, states.device)
            buffer[rows, dims, slots[:, self.part]] = states.transpose(1, 2)
        elif first + self._n <= self.count:
            buffer[:, :, first : first + self._n] = states
        else:
            buffer[:, :, torch.arange(first, first + self._n, device=states.device) % self.count] = states
        return buffer[:, :, : self._end]

    def _placed(self, order: Tensor, device: torch.device) -> tuple[Tensor, slice, Tensor]:
        """Index of this pass's tokens into buffers on a device."""
        if device not in self._slots:
            rows = torch.arange(len(order), device=device)[:, None]
            self._slots[device] = rows, slice(None), order.to(device) % self.count
        return self._slots[device]

    def _pass_by(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Return what attention sees, the old buffer followed by `states`; then store the last of these."""
        before = min(max(self._lengths), self.count)
        seen = torch.cat([buffer[:, :, :before], states], 2) if before else states
        base, pads = as_column(self._lengths, states.device), as_column(self._pads, states.device)
        position = self._positions(base + self._n - pads)  # (B, count)
        column = (position - base + pads).clamp(min=0)
        fresh = (position >= base)[:, None, :, None]
        buffer.copy_(torch.where(fresh, _gathered(states, column), buffer))
        return seen

    def held(self, device: torch.device) -> Tensor:
        """Position in each slot that attention sees, see `SpeculativeCache.held`."""
        if self.window is None:  # the slot's number; after a row's end no token sees that position
            return torch.arange(self._end, device=device)[None]
        base = self._base.to(device)
        if not self._passing:
            return _valid(self._positions(base + self._pending + self._n)[:, : self._end])
        before = _valid(self._positions(base)[:, : min(max(self._lengths), self.count)])
        new = base + torch.arange(self._n, device=device) if self._order is None else self._order
        return torch.cat([before, new], 1)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the tokens at positions `source` to positions `target`, both (B, D)."""
        source, target = source % self.count, target % self.count
        for buffers in self.all_buffers:
            for buffer in buffers:
                buffer.scatter_(2, _index(target, buffer), _gathered(buffer, source))

    def put(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        columns: Tensor,
        lengths: Sequence[int],
        indexed: Tensor | None = None,
    ) -> None:
        self._lengths, self._pending = lengths, 0
        if not self.buffers:
            most = max(lengths) + SPARE
            self.count = most if self.window is None else min(most, self.window - 1 + self._spare)
            self.count = slots_of_size(self.count) if self.sized else self.count
        position = self._positions(as_column(lengths, columns.device))
        column = columns.gather(1, position.clamp(0, columns.shape[1] - 1)).clamp(min=0)
        self.buffers[layer] = [_gathered(keys, column), _gathered(values, column)]
        if indexed is not None:
            self.indexed[layer] = [_gathered(indexed[:, None], column)]

    def take_indexed(self, layer: int, positions: Tensor) -> Tensor | None:
        if layer not in self.indexed:
            return None
        return _gathered(self.indexed.pop(layer)[0], positions.clamp(min=0) % self.count)[:, 0]

    def take(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.buffers.pop(layer)
        slots = positions.clamp(min=0) % self.count
        taken = _gathered(keys, slots)
        del keys
        return taken, _gathered(values, slots)

    def adopt(self, row: int, other: Slots, source: int, lengths: Sequence[int], theirs: Sequence[int]) -> None:
        """Copy a row of `other`, see `SpeculativeCache.adopt`; lengths, theirs: of our rows and of its rows."""
        self._lengths, self._pending = lengths, 0
        if other.count > self.count:
            self._resize(other.count)
        positions = other._positions(as_column(theirs[source : source + 1], torch.device("cpu")))[0]
        held = (positions >= 0).nonzero()[:, 0]
        slots = positions[held] % self.count
        for ours, others in ((self.buffers, other.buffers), (self.indexed, other.indexed)):
            for layer, buffers in others.items():
                if layer not in ours:
                    shape = (len(lengths), buffers[0].shape[1], self.count)
                    ours[layer] = [states.new_zeros(*shape, states.shape[3]) for states in buffers]
                for buffer, states in zip(ours[layer], buffers, strict=True):
                    slots, held = slots.to(buffer.device), held.to(states.device)
                    buffer[row, :, slots] = states[source, :, held]

    def take_over(self, other: Slots) -> None:
        """Take over the buffers of `other`, emptied; it has none afterwards."""
        self.count, self.buffers, self.indexed = other.count, other.buffers, other.indexed
        other.count, other.buffers, other.indexed = 0, {}, {}
        for buffers in self.all_buffers:
            for buffer in buffers:
                buffer.zero_()  # a value that is not finite would reach the tokens that do not see it

    def keep(self, rows: Sequence[int]) -> None:
        for buffers in self.all_buffers:
            buffers[:] = [buffer[list(rows)] for buffer in buffers]

    def _resize(self, count: int) -> None:
        """Grow to `count` slots. Only one buffer at a time exists twice."""
        old, self.count = self.count, count
        wraps = max(self._lengths) + self._pending > old
        for buffers in self.all_buffers:
            for i in range(len(buffers)):
                buffers[i] = self._resized(buffers[i], old, wraps)

    def _resized(self, buffer: Tensor, old: int, wraps: bool) -> Tensor:
        if wraps:
            written = as_column(self._lengths, buffer.device) + self._pending
            return _gathered(buffer, self._positions(written).clamp(min=0) % old)
        grown = buffer.new_zeros(*buffer.shape[:2], self.count, buffer.shape[3])
        grown[:, :, :old] = buffer
        return grown

    def _positions(self, written: Tensor) -> Tensor:
        """Position (B, count) in each slot after `written` (B, 1) positions were written; negative if empty."""
        last = written - 1
        return last - (last - torch.arange(self.count, device=written.device)) % self.count


def _valid(positions: Tensor) -> Tensor:
    return positions.masked_fill(positions < 0, NEVER)


def as_column(numbers: Sequence[int], device: torch.device) -> Tensor:
    return uploaded(list(numbers), device)[:, None]


def _index(slots: Tensor, buffer: Tensor) -> Tensor:
    """Expand slots (B, T) to an index into a buffer (B, heads, S, dim), without allocating memory."""
    return slots.to(buffer.device)[:, None, :, None].expand(len(buffer), buffer.shape[1], -1, buffer.shape[3])


def _gathered(buffer: Tensor, slots: Tensor) -> Tensor:
    """Gather slots (B, T) of a buffer: (B, heads, T, dim)."""
    return buffer.gather(2, _index(slots, buffer))
