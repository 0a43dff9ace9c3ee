"""`CachedRows`: a batch of ragged rows in one cache, and where a pass over them reads and writes.

Owns slots, positions and what each new token sees. Knows nothing of models: `ModelRunner` and the EAGLE-3 head's runner
both stand on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.cache import SpeculativeCache


class CachedRows:
    """Rows that grow by known tokens, or by a draft of which a part is kept.

    Attributes:
        cache: the keys and values. pending: draft nodes written behind the rows and not committed.
    """

    def __init__(self) -> None:
        self.cache = SpeculativeCache(0)
        self.pending = 0

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def aligned(self) -> bool:
        """All rows have one length."""
        return len(set(self.lengths)) == 1

    def start(self, batch_size: int) -> None:
        """Forget everything; the next rows are `batch_size` empty ones."""
        self.cache = SpeculativeCache(batch_size)
        self.pending = 0

    def place_known(self, width: int, pads: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Place `width` known tokens behind the rows, row b's first `pads[b]` being padding.

        Returns:
            positions (B, width), and visible (B, width, slots) bool; None where plain causal attention over these
            tokens alone is the same.
        """
        if not any(pads) and self.aligned:
            start = self.lengths[0]
            self.cache.place(0, width)
            positions = start + torch.arange(width, device=device).expand(len(pads), width)
            return positions, None if start == 0 else self._causal(positions)
        pad = torch.tensor(list(pads), device=device)[:, None]
        order = torch.arange(width, device=device) - pad  # (B, width) negative for padding
        base = torch.tensor(self.lengths, device=device)[:, None]
        # Padding rotates behind the row: its slots are never committed and soon overwritten.
        self.cache.place(0, width, slots=base + order.remainder(width))
        positions = base + order.clamp(min=0)
        return positions, self._causal(positions)

    def place_draft(self, depth: Tensor, ancestors: Tensor, chain: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Place n draft nodes behind the rows and behind the M nodes already pending.

        Args:
            depth: (B, M + n) int64, position = length + depth. ancestors: (B, n, M + n) bool, what each node sees.
            chain: the nodes form one path in order, in every row.

        Returns:
            positions (B, n), visible (B, n, slots) bool, and the position of each slot's token (B, slots).
        """
        n, M = ancestors.shape[1:]
        base = torch.tensor(self.lengths, device=depth.device)[:, None]
        slots = None if self.aligned else base + self.pending + torch.arange(n, device=depth.device)
        self.cache.place(self.pending, n, slots)
        slot = torch.arange(self.cache.end, device=depth.device)
        if chain and n == 1 and slots is None:  # the one token of plain decoding sees everything
            return base + depth[:, self.pending :], slot.new_ones(len(base), 1, len(slot)).bool(), slot[None]
        node = slot - base  # (B, slots) the draft node in each slot, negative where committed
        in_draft = (node >= 0) & (node < M)
        index = node.clamp(0, M - 1)
        seen = ancestors.gather(2, index[:, None].expand(-1, n, -1)) & in_draft[:, None]
        visible = seen | (node < 0)[:, None]
        slot_positions = torch.where(in_draft, base + depth.gather(1, index), slot)
        return base + depth[:, self.pending :], visible, slot_positions

    def commit(self, growth: Sequence[int], path: Tensor | None = None) -> None:
        """Keep the first `growth[b]` of the pending nodes, or of `path` (B, D) through them; forget the others."""
        self.cache.commit(growth, path)
        self.pending = 0

    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll each row back to at most `lengths[b]` tokens."""
        self.cache.lengths = [min(have, most) for have, most in zip(self.lengths, lengths, strict=True)]

    def _causal(self, positions: Tensor) -> Tensor:
        """(B, width, slots) bool: slots up to each token's own position."""
        return torch.arange(self.cache.end, device=positions.device) <= positions[..., None]
