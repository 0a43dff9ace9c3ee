"""`SpeculativeCache`: the keys and values of a batch whose rows have different lengths and may be rolled back.

Owns the slots: row b's token at position p lives in slot p, where windows slide in slot p modulo their number. A draft
is written behind the row, and rolling back is not growing. Knows nothing of trees: `commit` moves what it is told to.
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
    """Preallocated buffers (B, heads, slots, dim) per layer, a committed length per row.

    Before a forward pass, `place` says where its tokens go; each layer's `update` then writes there and returns what
    attention may see, whose positions `held` tells. What is written counts only once `commit` has grown the row.

    Args:
        batch_size: B. spans: how far back each layer looks; where there are more layers, the last one's holds for them.
        keeps_all: keep also what no layer will look at again. sized: buffers come in few sizes, and a draft sees them
            whole, so that its pass can be captured (`static_forward`).

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
            self.move(as_column(self.lengths, source.device), source)
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

    # What recurrent layers ask of a cache (5.17 to 5.24, cache_utils.py). They are told that there is no state yet, and
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

    # What transformers' models and mask builders ask of a cache (5.17 to 5.24, cache_utils.py and masking_utils.py).
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
