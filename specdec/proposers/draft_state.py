"""`DraftState`: the part of a text that a head has read, for a later call that continues from the text's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.models.cache.ragged_rows import CachedRows


@dataclass(frozen=True)
class DraftState:
    """States and entries of B rows that a head has read.

    Attributes:
        layers: the head's keys and values (B, heads, L, dim), by layer.
        lengths: B ints, entries of each row in them. Entry i belongs to the target's state at token i and to token i+1.
        waiting: per row, the target's states (n, C) at the tokens after these entries, which the head has not read.
    """

    layers: dict[int, tuple[Tensor, Tensor]]
    lengths: Sequence[int]
    waiting: Sequence[Tensor]

    @classmethod
    def of(cls, rows: CachedRows, waiting: Sequence[Tensor]) -> DraftState | None:
        """Move the entries out of a head's rows. None if layers have windows, which keep no early entries."""
        if any(span.window is not None for span in rows.spans):
            return None
        positions = torch.arange(max(rows.lengths)).expand(len(rows.lengths), -1)
        layers = {layer: rows.cache.take(layer, positions) for layer in rows.cache.filled}
        return cls(layers, list(rows.lengths), waiting)

    def put_into(self, rows: CachedRows) -> None:
        """Fill a head's empty rows with the entries."""
        if any(self.lengths):
            rows.cache.begin_at(self.lengths)
            columns = torch.arange(max(self.lengths)).expand(len(self.lengths), -1)
            for layer, (keys, values) in self.layers.items():
                rows.cache.put(layer, keys, values, columns)

    @property
    def known(self) -> list[int]:
        """Number of tokens of each row whose states the head has or waits to read."""
        return [length + len(part) for length, part in zip(self.lengths, self.waiting, strict=True)]

    def up_to(self, cached: Sequence[int], same: Sequence[int]) -> DraftState:
        """Keep what holds for rows that have changed since.

        Where states are missing, the head reads on with a gap.

        Args:
            cached: tokens of each row in the target's cache now.
            same: tokens of each row that are the same as before.
        """
        lengths, waiting = [], []
        for length, part, known, have, alike in zip(self.lengths, self.waiting, self.known, cached, same, strict=True):
            lengths.append(max(0, min(length, have - 1, alike - 1)))
            whole = lengths[-1] == length and known >= have and alike >= have
            waiting.append(part[: have - length] if whole else part[:0])
        return replace(self, lengths=lengths, waiting=waiting)
