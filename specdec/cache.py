"""`SpeculativeCache`: the keys and values of a batch whose rows have different lengths and may be rolled back.

Owns the slots: row b's token at position p lives in slot p, so each row has its own length, a draft is written behind
it, and rolling back is not growing. Knows nothing of trees: `commit` moves slots it is told to move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

BLOCK = 256  # slots by which the buffers grow


class SpeculativeCache(Cache):
    """Preallocated per-layer buffers (B, heads, slots, dim), a committed length per row.

    Before a forward pass, `place` says which slots its tokens go to; each layer's `update` then writes there and
    returns what attention may see, `[:end]` of the buffer. Written slots count only once `commit` has grown the row.

    Attributes:
        lengths: committed tokens of each row, on the host. end: slots that attention sees in the present pass.
    """

    def __init__(self, batch_size: int):
        super().__init__(layers=[])
        self.lengths = [0] * batch_size
        self._keys: list[Tensor | None] = []
        self._values: list[Tensor | None] = []
        self._start = 0  # of the tokens being written, where all rows agree
        self.end = 0
        self._slots: Tensor | None = None  # (B, n) where the rows do not

    def place(self, offset: int, count: int, slots: Tensor | None = None) -> None:
        """Say where the next pass writes its `count` tokens per row.

        Args:
            offset: they start `offset` slots behind each row's length.
            slots: (B, count) int64, the very slots; None when all rows have one length and they are consecutive.
        """
        self._start = self.lengths[0] + offset
        self.end = max(self.lengths) + offset + count
        self._slots = slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, n, dim) into the placed slots; return the layer's (B, heads, end, dim) keys and values."""
        while len(self._keys) <= layer_idx:
            self._keys.append(None)
            self._values.append(None)
        keys = self._keys[layer_idx] = _write(self._keys[layer_idx], key_states, self._start, self.end, self._slots)
        values = self._values[layer_idx] = _write(
            self._values[layer_idx], value_states, self._start, self.end, self._slots
        )
        return keys[:, :, : self.end], values[:, :, : self.end]

    def commit(self, growth: Sequence[int], source: Tensor | None = None) -> None:
        """Grow each row by `growth[b]` tokens, those in the slots right behind it.

        Args:
            source: (B, D) int64, offsets behind each row's length: place d is filled from `source[:, d]` first (an
                accepted tree path; a no-op where source[b, d] == d). None: they already lie in order.
        """
        if source is not None:
            base = torch.tensor(self.lengths, device=source.device)[:, None]
            target = base + torch.arange(source.shape[1], device=source.device)
            self._move(base + source, target)
        self.lengths = [length + grown for length, grown in zip(self.lengths, growth, strict=True)]

    def _move(self, source: Tensor, target: Tensor) -> None:
        for buffers in (self._keys, self._values):
            for buffer in buffers:
                if buffer is None:
                    continue
                at = target.to(buffer.device)[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
                taken = buffer.gather(2, source.to(buffer.device)[:, None, :, None].expand_as(at))
                buffer.scatter_(2, at, taken)

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The layer's whole buffers (B, heads, slots, dim); slots beyond a row's length hold leftovers."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            raise IndexError(f"layer {layer_idx} has no cache: it reads another layer's keys and values")
        return keys, values

    # What transformers' models and mask builders ask of a cache (5.17 to 5.23, cache_utils.py and masking_utils.py).

    def __len__(self) -> int:
        return len(self._keys)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._start

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        return self.end, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


def _write(buffer: Tensor | None, states: Tensor, start: int, end: int, slots: Tensor | None) -> Tensor:
    B, heads, n, dim = states.shape
    if buffer is None or buffer.shape[2] < end:
        # Zeros, not garbage: a masked slot still enters attention as 0 * value, and 0 * NaN is NaN.
        grown = states.new_zeros(B, heads, -(-end // BLOCK) * BLOCK, dim)
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        buffer = grown
    if slots is None:
        buffer[:, :, start : start + n] = states
    else:
        rows = torch.arange(B, device=states.device)[:, None]
        buffer[rows, :, slots.to(states.device)] = states.transpose(1, 2)
    return buffer
