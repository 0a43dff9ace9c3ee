"""`DraftState`: the part of a text that a head has read, for a later call that continues from the text's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.models.cache.ragged_rows import CachedRows


@dataclass(frozen=True)
class Entries:
    """Keys and values of one layer.

    Attributes:
        keys: (B, heads, L, dim).
        values: (B, heads, L, dim).
        first: position of the first ones.
        window: entries before the last `window` of a row have left the layer's window; None: all are there.
    """

    keys: Tensor
    values: Tensor
    first: int = 0
    window: int | None = None


@dataclass(frozen=True)
class DraftState:
    """States and entries of B rows that a head has read.

    Attributes:
        layers: the head's keys and values, by layer.
        lengths: B ints, entries of each row in them. Entry i belongs to the target's state at token i and to token i+1.
        waiting: per row, the target's states (n, C) at the tokens after these entries, which the head has not read.
    """

    layers: dict[int, Entries]
    lengths: Sequence[int]
    waiting: Sequence[Tensor]

    @classmethod
    def of(cls, rows: CachedRows, waiting: Sequence[Tensor]) -> DraftState:
        """Move the entries out of a head's rows."""
        layers, lengths = {}, list(rows.lengths)
        for layer in rows.cache.filled:
            window = rows.spans[min(layer, len(rows.spans) - 1)].window
            first = 0 if window is None else max(0, min(lengths) - window)
            positions = torch.arange(first, max(lengths)).expand(len(lengths), -1)
            layers[layer] = Entries(*rows.cache.take(layer, positions), first, window)
        return cls(layers, lengths, waiting)

    def put_into(self, rows: CachedRows) -> None:
        """Fill a head's empty rows with the entries."""
        if any(self.lengths):
            rows.cache.begin_at(self.lengths)
            for layer, entries in self.layers.items():
                columns = torch.arange(-entries.first, max(self.lengths) - entries.first)
                rows.cache.put(layer, entries.keys, entries.values, columns.expand(len(self.lengths), -1))

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
        windows = [entries.window for entries in self.layers.values() if entries.window is not None]
        for length, part, known, have, alike in zip(self.lengths, self.waiting, self.known, cached, same, strict=True):
            unchanged = known == have <= alike
            left = length if unchanged else max(0, min(length, have - 1, alike - 1))
            whole = left == length and known >= have and alike >= have
            lost = left < length and any(length > window for window in windows)  # there is nothing to go back to
            lengths.append(0 if lost else left)
            waiting.append(part[: have - length] if whole else part[:0])
        return replace(self, lengths=lengths, waiting=waiting)
