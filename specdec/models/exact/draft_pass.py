"""`DraftPass`: what the layers of an exact view know about the pass over draft nodes that is running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from specdec.models.cache.buffers import NEVER, Span
from specdec.models.cache.ragged_rows import VisibleSlots
from specdec.models.positions import RowPositions

Made = TypeVar("Made")


@dataclass(frozen=True)
class Columns:
    """The keys that one node attends to, as plain decoding holds them: by column, padding first.

    Attributes:
        slots: slot of each of the C columns; any slot for padding.
        mask: (1, 1, 1, C) bool, False for padding; None where plain decoding passes no mask.
    """

    slots: Tensor | slice
    mask: Tensor | None


def in_order(visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Slots that each node sees, by position: (B, n, S) int32, and their number (B, n) int32.

    Entries after a node's number mean nothing.

    Args:
        visible: (B, n, S) bool, slots that each node sees.
        positions: (B, S) or (1, S) int64, position of each slot's token.

    Examples:
        >>> order, counts = in_order(torch.tensor([[[True, False, True]]]), torch.tensor([[1, 5, 0]]))
        >>> order[0, 0, : counts[0, 0]].tolist()
        [2, 0]
    """
    order = positions[:, None].expand(visible.shape).masked_fill(~visible, NEVER).argsort(-1)
    return order.int(), visible.sum(-1).int()


class DraftPass:
    """The current pass of a runner, see `exact_view`.

    Args:
        row_positions: the runner's, which hold the slots of the current pass.
        spans: attention span of each layer, see `SpeculativeCache`.
        cross: keys and values of an encoder's states; None without an encoder.

    Attributes:
        pads: number of padding columns before each row's text; empty for none.
        unknown_layers: linear layers whose input is not one vector per node, so that their result may not be exact.
    """

    def __init__(self, row_positions: RowPositions, spans: Sequence[Span], cross: DynamicCache | None = None):
        self._row_positions, self._spans, self._cross = row_positions, spans, cross
        self.pads: Sequence[int] = ()
        self.unknown_layers: set[nn.Module] = set()
        self._made: dict[tuple[str, Span], Any] = {}  # by `_once`
        self._of: VisibleSlots | None = None

    @property
    def batch_size(self) -> int:
        """Number of rows of the current pass."""
        return len(self._slots.positions)

    @property
    def nodes(self) -> int:
        """Number of nodes per row of the current pass."""
        return self._slots.positions.shape[1]

    def span(self, layer_idx: int) -> Span:
        """Attention span of a layer."""
        return self._spans[min(layer_idx, len(self._spans) - 1)]

    def are_of_encoder(self, keys: Tensor) -> bool:
        """Return whether a layer's keys are those of an encoder's states."""
        layers = [] if self._cross is None else self._cross.layers
        place = keys.untyped_storage().data_ptr()
        return any(layer.keys is not None and layer.keys.untyped_storage().data_ptr() == place for layer in layers)

    def columns(self, span: Span) -> list[list[Columns]]:
        """Columns that each node of each row sees in layers of this span."""

        def made(visible: Tensor, held: Tensor) -> list[list[Columns]]:
            return [
                [self._seen(nodes, held[row % len(held)], span, row) for nodes in visible[row % len(visible)]]
                for row in range(self.batch_size)
            ]

        return self._once("columns", span, made)

    def order(self, span: Span) -> tuple[Tensor, Tensor]:
        """Slots that each node sees in layers of this span, see `in_order`."""

        def made(visible: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
            return in_order(visible.expand(self.batch_size, -1, -1), held)

        return self._once("order", span, made)

    def _once(self, name: str, span: Span, make: Callable[[Tensor, Tensor], Made]) -> Made:
        """`make(visible, held)` for the slots of the current pass, computed once."""
        if self._of is not self._slots:
            self._made, self._of = {}, self._slots
        if (name, span) not in self._made:
            self._made[name, span] = make(self._slots.visible(span), self._slots.held(span))
        return self._made[name, span]

    def _seen(self, visible: Tensor, held: Tensor, span: Span, row: int) -> Columns:
        """The columns of a node that sees the `visible` ones of the slots (S,), which hold the positions `held`."""
        slots = visible.nonzero()[:, 0]
        slots = slots[held[slots].argsort(stable=True)]
        pad = self.pads[row] if self.pads else 0
        pad = pad if span.window is None else max(0, min(pad, span.window - len(slots)))
        length = pad + len(slots)
        masked = any(self.pads) or (span.window is not None and length >= span.window)  # as transformers decides
        mask = (torch.arange(length, device=slots.device) >= pad)[None, None, None] if masked else None
        first = int(slots[0])
        if not pad and torch.equal(slots, torch.arange(first, first + len(slots), device=slots.device)):
            return Columns(slice(first, first + len(slots)), mask)  # needs no copy
        return Columns(torch.cat([slots[:1].expand(pad), slots]), mask)

    @property
    def _slots(self) -> VisibleSlots:
        assert self._row_positions.visible_slots is not None
        return self._row_positions.visible_slots
