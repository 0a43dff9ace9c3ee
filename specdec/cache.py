"""`SpeculativeCache`: the keys and values of a batch whose rows have different lengths and may be rolled back.

Owns the slots: row b's token at position p lives in slot p, where windows slide in slot p modulo their number. A draft
is written behind the row, and rolling back is not growing. Knows nothing of trees: `commit` moves what it is told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import Cache

from specdec.recurrent import States
from specdec.transfer import uploaded

SPARE = 64  # slots more than are needed when buffers grow, or a sixteenth where that is more
FEWEST = 512  # slots of a buffer that comes in few sizes
NEVER = 2**62  # position of what lies in a slot that holds nothing


@dataclass(frozen=True)
class Span:
    """How far back a kind of layers looks.

    Attributes:
        window: tokens seen, the token itself included; None: all before it. chunked: not the last `window` ones but
            those in the same stretch of `window` positions.
    """

    window: int | None = None
    chunked: bool = False


def slots_of_size(count: int) -> int:
    """Slots of a buffer that holds so many and comes in few sizes: a text seldom outgrows one."""
    return max(FEWEST, 1 << (count - 1).bit_length())


class SpeculativeCache(Cache):
    """Preallocated buffers (B, heads, slots, dim) per layer, a committed length per row.

    Before a forward pass, `place` says where its tokens go; each layer's `update` then writes there and returns what
    attention may see, whose positions `held` tells. What is written counts only once `commit` has grown the row.

    Args:
        batch_size: B. spans: how far back each layer looks; where there are more layers, the last one's holds for them.
        keeps_all: keep also what no layer will look at again. sized: buffers come in few sizes, and a draft sees them
            whole, so that its pass can be captured (`graphs`).

    Attributes:
        lengths: committed tokens of each row, on the host. floors: what a row may still be rolled back to; None: to
            where it stands. end: slots that the tokens of the present pass reach to where no window slides. states:
            what layers carry besides keys and values.
    """

    def __init__(
        self, batch_size: int, spans: Sequence[Span] = (Span(),), keeps_all: bool = False, sized: bool = False
    ):
        super().__init__(layers=[])
        self.layers = _Layers(self)
        self.lengths = [0] * batch_size
        self.floors: list[int] | None = None
        self.states = States(batch_size)
        self.end = 0
        self._start = 0  # of the tokens being written, where all rows agree
        self._together = True  # they do
        self._positions: Tensor | None = None  # (P, B, S), see `indexer_position_ids`
        self._spans = spans
        self._kinds = {span: Slots(None if keeps_all else span.window, sized) for span in spans}

    def place(
        self, base: Tensor, pending: int, order: Tensor | None, pads: Sequence[int], count: int, draft: bool
    ) -> None:
        """Say where the next pass writes its `count` tokens per row: behind each row and `pending` tokens more.

        Args:
            base: (B, 1) int64, the rows' lengths, where masks are made; (1, 1) where all have one.
            order: (B, count) int64, the position each is written to; None: all rows have one length, no padding.
            pads: (B,) how many of them are padding, on the left, whose `order` is behind the row.
            draft: they may be rolled back.
        """
        self._start, self._together = self.lengths[0] + pending, order is None
        self.end = max(self.lengths) + pending + count
        floors = self.lengths if self.floors is None else self.floors
        ahead = max(length - floor for length, floor in zip(self.lengths, floors, strict=True))
        for kind in self._kinds.values():
            kind.place(self.lengths, base, ahead, pending, order, pads, count, draft)
        if not draft:
            self.states.place_known(pads, count, self.lengths)

    def reserve(self, more: int) -> None:
        """Make room for so many tokens more per row: until then buffers stay where they are."""
        for kind in self._kinds.values():
            kind.reserve(self.lengths, more)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Slots of the buffers, by kind of layers."""
        return tuple(kind.count for kind in self._kinds.values())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, n, dim) into the placed slots; return the layer's (B, heads, S, dim) keys and values."""
        return self._kind_of(layer_idx).write(layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *args: object, **kwargs: object) -> Tensor:
        """Likewise what an indexer keeps of the tokens, by which it picks those that attention sees: (B, n, D) in, the
        layer's (B, S, D) out. It is in the keys' slots, so what it picks are slots, and masks hold for it too."""
        return self._kind_of(layer_idx).write_indexed(layer_idx, indexer_key_states[:, None])[:, 0]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """(P, B, S), the model's own positions of what lies in the slots before the present pass: an indexer may ask
        the cache's layers for them, and gives them back with this pass's behind."""
        if not self._together:
            raise NotImplementedError("an indexer that keeps positions, for ragged rows")
        return self._positions[..., : self._start] if self._start and self._positions is not None else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        self._positions = positions

    def written(self, device: torch.device) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """By layer: its whole buffers of keys and values, and the slots (B, n) int64 of the pass that is placed."""
        kinds = {layer: self._kind_of(layer) for layer in self.filled}
        return {layer: (*kind.pair(layer), kind.slots(device)) for layer, kind in kinds.items()}

    def held(self, span: Span, device: torch.device) -> Tensor:
        """(B, S) int64, in the present pass: the position of what lies in each slot that attention sees, drafts counted
        in the order they were written; where that is nothing, one behind the row. (1, S) where all rows agree."""
        return self._kinds[span].held(device)

    def commit(self, growth: Sequence[int], source: Tensor | None = None) -> None:
        """Grow each row by `growth[b]` tokens, those in the slots right behind it.

        Args:
            source: (B, D) int64, offsets behind each row's length: place d is filled from `source[:, d]` first (an
                accepted tree path; a no-op where source[b, d] == d). None: they already lie in order.
        """
        if source is not None:
            self.move(_column(self.lengths, source.device), source)
        self.states.commit(source)
        self.lengths = [length + grown for length, grown in zip(self.lengths, growth, strict=True)]

    def move(self, base: Tensor, source: Tensor) -> None:
        """Fill place d behind the rows from offset source[:, d]; base: (B, 1) int64, their lengths."""
        target = base + torch.arange(source.shape[1], device=source.device)
        for kind in self._kinds.values():
            kind.move(base + source, target)

    # Known keys and values, in and out

    def put(self, layer_idx: int, keys: Tensor, values: Tensor, columns: Tensor, indexed: Tensor | None = None) -> None:
        """Fill a layer with what was computed elsewhere; `lengths` say how much that is.

        Args:
            keys, values: (B, heads, T, dim). columns: (B, max(lengths)) int64, where the token at each position is
                among the T; negative where it is not. indexed: (B, T, D), see `update_indexer`.
        """
        self._kind_of(layer_idx).put(layer_idx, keys, values, columns, self.lengths, indexed)

    def take(self, layer_idx: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values (B, heads, T, dim) of `positions` (B, T) int64; they are gone here then."""
        return self._kind_of(layer_idx).take(layer_idx, positions)

    def take_indexed(self, layer_idx: int, positions: Tensor) -> Tensor | None:
        """Likewise (B, T, D) of what its indexer keeps; None where it has none."""
        return self._kind_of(layer_idx).take_indexed(layer_idx, positions)

    def take_positions(self, count: int) -> Tensor | None:
        """(P, B, count), see `indexer_position_ids`; they are gone here then: the first layer that asks has them."""
        positions, self._positions = self._positions, None
        return None if positions is None else positions[..., :count]

    def adopt(self, row: int, other: SpeculativeCache) -> None:
        """Put the one row of `other`, a cache of the same model, in the place of this one's `row`."""
        self.states.settle(self.lengths)
        other.states.settle(other.lengths)
        self.states.adopt(row, other.states)
        self.lengths[row] = 0  # what lay there needs no room
        for span, kind in self._kinds.items():
            kind.adopt(row, other._kinds[span], self.lengths, other.lengths)
        self.lengths[row] = other.lengths[0]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.states.settle(self.lengths)
        self.states.keep(rows)
        self.lengths = [self.lengths[row] for row in rows]
        for kind in self._kinds.values():
            kind.keep(rows)

    @property
    def filled(self) -> list[int]:
        """Layers that hold keys and values; one without reads another one's."""
        return sorted(layer for kind in self._kinds.values() for layer in kind.buffers)

    @property
    def nbytes(self) -> dict[Span, int]:
        """Of all buffers, by kind of layers."""
        return {
            span: sum(buffer.nbytes for buffers in kind.all_buffers for buffer in buffers)
            for span, kind in self._kinds.items()
        }

    def _kind_of(self, layer_idx: int) -> Slots:
        return self._kinds[self._spans[min(layer_idx, len(self._spans) - 1)]]

    # What recurrent layers ask of a cache (5.17 to 5.23, cache_utils.py). They are told that there is no state yet, and
    # so always go the way of many tokens; what stands in for their functions (`mixers`) begins with the state.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.ids((layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """The inputs (B, C, n) of a convolution behind those before them, (B, C, T)."""
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        return self.states.convolve((layer_idx, state_idx), conv_states, width)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.states.ask((layer_idx, state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        self.states.updated((layer_idx, state_idx), recurrent_states.dim())
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        if layer_idx is not None:  # older versions ask thus before they read a state
            self.states.ask((layer_idx, state_idx or 0))
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    # What transformers' models and mask builders ask of a cache (5.17 to 5.23, cache_utils.py and masking_utils.py).
    # They build masks of their own only for a first pass without padding, or where nothing slides.

    def __len__(self) -> int:
        return max(self.filled, default=-1) + 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._start

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        return self.end, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


class _Layers(list[Any]):
    """None; whoever asks for one by its number gets the cache, which knows what there is to be asked."""

    def __init__(self, cache: SpeculativeCache):
        super().__init__()
        self._cache = ref(cache)

    def __getitem__(self, index: Any) -> Any:
        return self._cache()


class Slots:
    """The buffers of all layers of one kind, and where the tokens of the present pass go in them.

    Position p lies in slot p modulo `count`. Where a window slides, `count` is the window and room for what may be
    rolled back: what a draft overwrites is out of sight for whatever comes after the row.

    Args:
        window: how many tokens back anything is seen, the token itself included; None: all. sized: see the cache's.
    """

    def __init__(self, window: int | None, sized: bool = False):
        self.window, self.sized = window, sized
        self.count = 0
        self._slots: dict[torch.device, tuple[Tensor, slice, Tensor]] = {}
        self.buffers: dict[int, list[Tensor]] = {}  # keys and values by layer, (B, heads, count, dim) each
        self.indexed: dict[int, list[Tensor]] = {}  # what indexers keep, by layer, one (B, 1, count, D) each
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
        """See `SpeculativeCache.place`. ahead: tokens by which a row may be rolled back."""
        self._lengths, self._pending, self._order, self._pads, self._n = lengths, pending, order, pads, count
        self._base, self._slots = base, {}
        end = max(lengths) + pending + count
        # Many known tokens need not all be kept: they see one another beside the buffer, which takes the last ones.
        self._passing = not draft and self.window is not None and count > self._spare
        needed = end
        if self.window is not None:
            loose = self._spare if self._passing else max(self._spare, ahead + pending + count)
            needed = min(end, self.window - 1 + loose)
        if needed > self.count:
            self._resize(self._roomy(needed))
        self._end = self.count if self.sized and draft else min(end, self.count)

    def reserve(self, lengths: Sequence[int], more: int) -> None:
        self._lengths, self._pending = lengths, 0
        needed = max(lengths) + more
        if self.window is not None:
            needed = min(needed, self.window - 1 + max(self._spare, more))
        if needed > self.count:
            self._resize(self._roomy(needed))

    def _roomy(self, needed: int) -> int:
        """How many slots to take where so many are needed."""
        if self.sized:
            return slots_of_size(needed)
        roomy = needed + max(SPARE, needed // 16)
        return roomy if self.window is None else min(roomy, max(needed, self.window - 1 + self._spare))

    def pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's whole buffers of keys and values."""
        keys, values = self.buffers[layer]
        return keys, values

    def slots(self, device: torch.device) -> Tensor:
        """(B, n) int64, where this pass's tokens are written."""
        assert self._order is not None
        return self._placed(self._order, device)[2]

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
        """Of all layers, in lists in which they can be replaced."""
        return [*self.buffers.values(), *self.indexed.values()]

    def _store(self, buffer: Tensor, states: Tensor) -> Tensor:
        """What attention sees: the buffer, with `states` in their slots."""
        first = (self._lengths[0] + self._pending) % self.count
        if self._order is not None:
            buffer[self._placed(self._order, states.device)] = states.transpose(1, 2)
        elif first + self._n <= self.count:
            buffer[:, :, first : first + self._n] = states
        else:
            buffer[:, :, torch.arange(first, first + self._n, device=states.device) % self.count] = states
        return buffer[:, :, : self._end]

    def _placed(self, order: Tensor, device: torch.device) -> tuple[Tensor, slice, Tensor]:
        """Where this pass's tokens lie in the buffers of a device."""
        if device not in self._slots:
            rows = torch.arange(len(order), device=device)[:, None]
            self._slots[device] = rows, slice(None), order.to(device) % self.count
        return self._slots[device]

    def _pass_by(self, buffer: Tensor, states: Tensor) -> Tensor:
        """What attention sees: the buffer as it was, and `states` behind it, the last of which then go into it."""
        before = min(max(self._lengths), self.count)
        seen = torch.cat([buffer[:, :, :before], states], 2) if before else states
        base, pads = _column(self._lengths, states.device), _column(self._pads, states.device)
        position = self._positions(base + self._n - pads)  # (B, count)
        column = (position - base + pads).clamp(min=0)
        fresh = (position >= base)[:, None, :, None]
        buffer.copy_(torch.where(fresh, _gathered(states, column), buffer))
        return seen

    def held(self, device: torch.device) -> Tensor:
        if self.window is None:  # a slot's number; behind a row's end that is a position nobody looks at
            return torch.arange(self._end, device=device)[None]
        base = self._base.to(device)
        if not self._passing:
            return _valid(self._positions(base + self._pending + self._n)[:, : self._end])
        before = _valid(self._positions(base)[:, : min(max(self._lengths), self.count)])
        new = base + torch.arange(self._n, device=device) if self._order is None else self._order
        return torch.cat([before, new], 1)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy what lies at the positions `source` to `target`, both (B, D)."""
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
        position = self._positions(_column(lengths, columns.device))
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

    def adopt(self, row: int, other: Slots, lengths: Sequence[int], theirs: Sequence[int]) -> None:
        """See `SpeculativeCache.adopt`. lengths, theirs: of the rows here and of the one there."""
        self._lengths, self._pending = lengths, 0
        if other.count > self.count:
            self._resize(other.count)
        positions = other._positions(_column(theirs, torch.device("cpu")))[0]
        held = (positions >= 0).nonzero()[:, 0]
        slots = positions[held] % self.count
        for ours, others in ((self.buffers, other.buffers), (self.indexed, other.indexed)):
            for layer, buffers in others.items():
                if layer not in ours:
                    shape = (len(lengths), buffers[0].shape[1], self.count)
                    ours[layer] = [states.new_zeros(*shape, states.shape[3]) for states in buffers]
                for buffer, states in zip(ours[layer], buffers, strict=True):
                    buffer[row, :, slots] = states[0, :, held]

    def keep(self, rows: Sequence[int]) -> None:
        for buffers in self.all_buffers:
            buffers[:] = [buffer[list(rows)] for buffer in buffers]

    def _resize(self, count: int) -> None:
        """Go on with `count` slots, more than before; one buffer at a time is held twice."""
        old, self.count = self.count, count
        wraps = max(self._lengths) + self._pending > old
        for buffers in self.all_buffers:
            for i in range(len(buffers)):
                buffers[i] = self._resized(buffers[i], old, wraps)

    def _resized(self, buffer: Tensor, old: int, wraps: bool) -> Tensor:
        if wraps:
            written = _column(self._lengths, buffer.device) + self._pending
            return _gathered(buffer, self._positions(written).clamp(min=0) % old)
        grown = buffer.new_zeros(*buffer.shape[:2], self.count, buffer.shape[3])
        grown[:, :, :old] = buffer
        return grown

    def _positions(self, written: Tensor) -> Tensor:
        """(B, count): what each slot holds once `written` (B, 1) positions are, negative for nothing."""
        last = written - 1
        return last - (last - torch.arange(self.count, device=written.device)) % self.count


def _valid(positions: Tensor) -> Tensor:
    return positions.masked_fill(positions < 0, NEVER)


def _column(numbers: Sequence[int], device: torch.device) -> Tensor:
    return uploaded(list(numbers), device)[:, None]


def _index(slots: Tensor, buffer: Tensor) -> Tensor:
    """(B, T) slots as an index into a buffer (B, heads, S, dim), without memory of its own."""
    return slots.to(buffer.device)[:, None, :, None].expand(len(buffer), buffer.shape[1], -1, buffer.shape[3])


def _gathered(buffer: Tensor, slots: Tensor) -> Tensor:
    """(B, heads, T, dim) of slots (B, T)."""
    return buffer.gather(2, _index(slots, buffer))
