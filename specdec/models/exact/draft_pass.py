"""`DraftPass`: what the layers of an exact view know about the pass over draft nodes that is running."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.models.cache.buffers import Span
from specdec.models.positions import RowPositions

Path = Tensor | slice  # of slots


class DraftPass:
    """The slots that each node of the current pass sees, in the order in which plain decoding would hold them.

    Args:
        row_positions: the runner's, which hold the slots of the current pass.
        spans: attention span of each layer, see `SpeculativeCache`.
    """

    def __init__(self, row_positions: RowPositions, spans: Sequence[Span]):
        self._row_positions, self._spans = row_positions, spans
        self._paths: dict[Span, list[list[Path]]] = {}
        self._of: object = None

    @property
    def batch_size(self) -> int:
        """Number of rows of the current pass."""
        return len(self._slots.positions)

    def span(self, layer_idx: int) -> Span:
        """Attention span of a layer."""
        return self._spans[min(layer_idx, len(self._spans) - 1)]

    def paths(self, span: Span) -> list[list[Path]]:
        """By row and node, the slots that the node sees in layers of this span, by their position."""
        if self._of is not self._slots:
            self._paths, self._of = {}, self._slots
        if span not in self._paths:
            visible, held = self._slots.visible(span), self._slots.held(span)
            held = held.expand(len(visible), -1)
            self._paths[span] = [
                [_path(seen, held[row]) for seen in visible[row if len(visible) > 1 else 0]]
                for row in range(self.batch_size)
            ]
        return self._paths[span]

    @property
    def _slots(self):
        assert self._row_positions.visible_slots is not None
        return self._row_positions.visible_slots


def _path(seen: Tensor, held: Tensor) -> Path:
    """The slots (S,) that are `seen`, ordered by the position that each one holds."""
    slots = seen.nonzero()[:, 0]
    slots = slots[held[slots].argsort(stable=True)]
    first = int(slots[0])
    return slice(first, first + len(slots)) if torch.equal(slots, torch.arange(first, first + len(slots))) else slots
