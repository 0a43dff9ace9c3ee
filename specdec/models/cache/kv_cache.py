"""`SpeculativeCache`: the KV cache of a batch whose rows have different lengths and can be rolled back.

Row b's token at position p lies in slot p, or with a sliding window in slot p modulo the number of slots. A draft is
written after the row. Committing grows the row; a draft that is not committed is overwritten by the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import Cache

from specdec.models.cache.buffers import Slots, Span, as_column
from specdec.models.cache.recurrent_states import States


class SpeculativeCache(Cache):
    """KV cache with preallocated buffers (B, heads, slots, dim) per layer and a committed length per row.

    Before a forward pass, `place` sets where its tokens go. Each layer's `update` writes there and returns the keys and
    values that attention may see; `held` gives their positions. Tokens count only once `commit` has grown the row.

    Args:
        batch_size: B.
        spans: attention span of each layer. Layers beyond the last entry have its span.
        keeps_all: also keep tokens that have left every window.
        sized: buffers have few sizes and drafts see them whole, so that passes can be captured (`static_forward`).
        states: class of the recurrent states.

    Attributes:
        lengths: committed tokens of each row, on the host.
        floors: length to which each row may still be rolled back; None: its current length.
        end: slots in use without a sliding window, including the tokens of the current pass.
        states: recurrent states and convolution windows.
    """

    def __init__(
        self,
        batch_size: int,
        spans: Sequence[Span] = (Span(),),
        keeps_all: bool = False,
        sized: bool = False,
        states: type[States] = States,
    ):
        super().__init__(layers=[])
        self.layers, self.sized = _Layers(self), sized
        self.lengths = [0] * batch_size
        self.floors: list[int] | None = None
        self.states = states(batch_size)
        self.end = 0
        self._start = 0  # position of the pass's first token, if all rows have one length
        self._together = True  # all rows have one length and no padding
        self._positions: Tensor | None = None  # (P, B, S), see `indexer_position_ids`
        self._spans = spans
        self._kinds = {span: Slots(None if keeps_all else span.window, sized) for span in spans}

    def place(
        self, base: Tensor, pending: int, order: Tensor | None, pads: Sequence[int], count: int, draft: bool
    ) -> None:
        """Set where the next pass writes its `count` tokens per row: after each row and its `pending` draft nodes.

        Args:
            base: (B, 1) int64, the rows' lengths, on the device that builds masks; (1, 1) if all are equal.
            pending: draft nodes that earlier passes wrote after each row.
            order: (B, count) int64, position to write each token to; None if rows have one length and no padding.
            pads: (B,) number of padding tokens on the left, whose `order` lies after the row.
            count: tokens per row.
            draft: the tokens may be rolled back.
        """
        self._start, self._together = self.lengths[0] + pending, order is None
        self.end = max(self.lengths) + pending + count
        floors = self.lengths if self.floors is None else self.floors
        ahead = max(length - floor for length, floor in zip(self.lengths, floors, strict=True))
        for kind in self._kinds.values():
            kind.place(self.lengths, base, ahead, pending, order, pads, count, draft)
        if not draft:
            self.states.place_known(pads, count, self.lengths)

    def run_part(self, part: slice) -> None:
        """Let the next pass run only these of the placed tokens."""
        for kind in self._kinds.values():
            kind.part = part

    def reserve(self, more: int, end: int = 0) -> None:
        """Allocate slots for `more` tokens per row, and at least `end`. Until these are used, buffers stay in place."""
        for kind in self._kinds.values():
            kind.reserve(self.lengths, more, end)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of slots per kind of layers."""
        return tuple(kind.count for kind in self._kinds.values())

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of all buffers: a captured pass is valid for these alone."""
        return tuple(buffer.data_ptr() for kind in self._kinds.values() for held in kind.all_buffers for buffer in held)

    def take_over(self, other: SpeculativeCache) -> None:
        """Take over the buffers of an earlier cache for the same model and batch size; it has none afterwards."""
        for span, kind in self._kinds.items():
            kind.take_over(other._kinds[span])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, n, dim) into the placed slots; return the layer's (B, heads, S, dim) keys and values."""
        return self._kind_of(layer_idx).write(layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *args: object, **kwargs: object) -> Tensor:
        """Write indexer keys (B, n, D) into the placed slots; return the layer's (B, S, D).

        An indexer picks the tokens that attention sees. It uses the same slots as attention, so the same masks apply.
        """
        return self._kind_of(layer_idx).write_indexed(layer_idx, indexer_key_states[:, None])[:, 0]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Model's own positions (P, B, S) of the tokens before the current pass.

        An indexer may read them from the cache's layers. It sets them again with the positions of the pass appended.
        """
        if not self._together:
            raise NotImplementedError("the indexer keeps positions, which needs rows of one length without padding")
        return self._positions[..., : self._start] if self._start and self._positions is not None else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        self._positions = positions

    def written(self, device: torch.device) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Map each layer to its whole key and value buffers and the slots (B, n) int64 of the placed pass."""
        kinds = {layer: self._kind_of(layer) for layer in self.filled}
        return {layer: (*kind.pair(layer), kind.slots(device)) for layer, kind in kinds.items()}

    def committed(self, layer_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's whole key and value buffers, and the position (B, S) int64 in each slot, negative if empty.

        Positions of a draft that was not committed count as the older ones that it overwrote, which no window reaches.
        """
        return self._kind_of(layer_idx).committed(layer_idx, self.lengths)

    def held(self, span: Span, device: torch.device) -> Tensor:
        """Position (B, S) int64 in each slot that attention sees in the current pass; (1, S) if all rows agree.

        Draft nodes count in the order they were written. An empty slot has a position after the row.
        """
        return self._kinds[span].held(device)

    def commit(self, growth: Sequence[int], source: Tensor | None = None) -> None:
        """Grow each row by the `growth[b]` tokens right after it.

        Args:
            growth: number of tokens to commit per row.
            source: (B, D) int64, an accepted tree path as offsets from each row's length. The token at offset
                `source[b, d]` is first moved to offset d. None: the tokens already lie in order.
        """
        if source is not None:
            self.move(as_column(self.lengths, source.device), source)
        self.states.commit(source)
        self.lengths = [length + grown for length, grown in zip(self.lengths, growth, strict=True)]

    def truncate(self, lengths: Sequence[int], floors: Sequence[int] | None = None) -> None:
        """Roll each row back to at most `lengths[b]` tokens; floors: length to which it may be rolled back later."""
        self.lengths = [min(have, most) for have, most in zip(self.lengths, lengths, strict=True)]
        self.floors = None if floors is None else [min(f, n) for f, n in zip(floors, self.lengths, strict=True)]

    def move(self, base: Tensor, source: Tensor) -> None:
        """Copy the tokens at offsets `source` (B, D) from the rows' lengths `base` (B, 1) to offsets 0 to D - 1."""
        target = base + torch.arange(source.shape[1], device=source.device)
        for kind in self._kinds.values():
            kind.move(base + source, target)

    # Import and export of keys and values

    def begin_at(self, lengths: Sequence[int]) -> None:
        """Give the empty rows these lengths, before `put` fills the layers."""
        self.lengths = list(lengths)

    def put(self, layer_idx: int, keys: Tensor, values: Tensor, columns: Tensor, indexed: Tensor | None = None) -> None:
        """Fill a layer with keys and values computed elsewhere, of `lengths` tokens per row.

        Args:
            layer_idx: the layer.
            keys: (B, heads, T, dim).
            values: (B, heads, T, dim).
            columns: (B, max(lengths)) int64, index among the T of the token at each position; negative if missing.
            indexed: (B, T, D) indexer keys, see `update_indexer`.
        """
        self._kind_of(layer_idx).put(layer_idx, keys, values, columns, self.lengths, indexed)

    def take(self, layer_idx: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Remove a layer's keys and values; return those (B, heads, T, dim) at `positions` (B, T) int64."""
        return self._kind_of(layer_idx).take(layer_idx, positions)

    def take_indexed(self, layer_idx: int, positions: Tensor) -> Tensor | None:
        """Remove a layer's indexer keys; return those (B, T, D) at `positions`, or None if it has no indexer."""
        return self._kind_of(layer_idx).take_indexed(layer_idx, positions)

    def take_positions(self, count: int) -> Tensor | None:
        """Remove `indexer_position_ids`; return the first `count`, or None if an earlier call has taken them."""
        positions, self._positions = self._positions, None
        return None if positions is None else positions[..., :count]

    def adopt(self, row: int, other: SpeculativeCache, source: int = 0) -> None:
        """Replace row `row` with row `source` of `other`, a cache of the same model."""
        self.states.settle(self.lengths)
        other.states.settle(other.lengths)
        self.states.adopt(row, other.states, source)
        self.lengths[row] = 0  # the old row needs no slots
        for span, kind in self._kinds.items():
            kind.adopt(row, other._kinds[span], source, self.lengths, other.lengths)
        self.lengths[row] = other.lengths[source]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.states.settle(self.lengths)
        self.states.keep(rows)
        self.lengths = [self.lengths[row] for row in rows]
        for kind in self._kinds.values():
            kind.keep(rows)

    @property
    def filled(self) -> list[int]:
        """Layers that hold keys and values. Other layers read one of theirs."""
        return sorted(layer for kind in self._kinds.values() for layer in kind.buffers)

    @property
    def nbytes(self) -> dict[Span, int]:
        """Bytes of all buffers, per kind of layers."""
        return {
            span: sum(buffer.nbytes for buffers in kind.all_buffers for buffer in buffers)
            for span, kind in self._kinds.items()
        }

    def _kind_of(self, layer_idx: int) -> Slots:
        return self._kinds[self._spans[min(layer_idx, len(self._spans) - 1)]]

    # Interface for recurrent layers (transformers 5.17 to 5.24, cache_utils.py). It reports no previous state, so they
    # always take their multi-token path. The replacement functions in `recurrent_layers` start from the real state.

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
        """Return the inputs (B, C, T) of a convolution: the earlier ones, then `conv_states` (B, C, n)."""
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
        if layer_idx is not None:  # older releases call this before they read a state
            self.states.ask((layer_idx, state_idx or 0))
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    # Interface for models and mask builders (transformers 5.17 to 5.24, cache_utils.py and masking_utils.py). These
    # build their own masks only for a first pass without padding, or without sliding windows.

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
    """Empty list of cache layers that returns the cache for any index: it answers for all of them."""

    def __init__(self, cache: SpeculativeCache):
        super().__init__()
        self._cache = ref(cache)

    def __getitem__(self, index: Any) -> Any:
        return self._cache()
