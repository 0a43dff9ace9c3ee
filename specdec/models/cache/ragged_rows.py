"""`CachedRows`: a batch of ragged rows in one cache, where a pass over them writes and what it sees.

Owns positions and what each new token sees. Knows nothing of models: `ModelRunner` and the EAGLE-3 head's runner both
stand on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.models.cache.buffers import Span
from specdec.models.cache.kv_cache import SpeculativeCache
from specdec.utils.device_copies import uploaded


@dataclass(frozen=True)
class VisibleSlots:
    """What the n tokens of a pass see of the cache and of one another.

    Attributes:
        cache: in which they are placed. positions: (B, n) int64. base: (B, 1) int64, or (1, 1), the rows' lengths.
        depth, ancestors: of draft nodes, see `CachedRows.place_draft`; None for known tokens, which see all before
            them. alone: plain causal attention over these tokens is the same, windows aside.
    """

    cache: SpeculativeCache
    positions: Tensor
    base: Tensor
    depth: Tensor | None = None
    ancestors: Tensor | None = None
    alone: bool = False

    def visible(self, span: Span) -> Tensor:
        """(B, n, S) bool over the slots that a layer of this kind looks at. No larger intermediate than that."""
        here = self.positions[..., None]
        if self.depth is None or self.ancestors is None:
            seen = self.held(span)[:, None] <= here
        else:
            seen = self._of_draft(self._slots(span) - self.base, self.ancestors)
        if span.window is None:
            return seen
        keys = self.held(span)[:, None]
        if span.chunked:
            return seen & (keys // span.window == here // span.window)
        return seen & (keys > here - span.window)

    def held(self, span: Span) -> Tensor:
        """(B or 1, S) int64, the position of the token in each slot that a layer of this kind looks at."""
        slots = self._slots(span)
        return slots if self.depth is None else self._positions_of(slots, slots - self.base, self.depth)

    def _slots(self, span: Span) -> Tensor:
        """Likewise, drafts counted in the order they were written: the draft's node, where behind `base`."""
        return self.cache.held(span, self.positions.device)

    def _of_draft(self, node: Tensor, ancestors: Tensor) -> Tensor:
        """(B, n, S) bool, which slots hold a committed token or an ancestor."""
        n, M = ancestors.shape[1:]
        index = node.clamp(0, M - 1)[:, None].expand(len(ancestors), n, -1)
        return (ancestors.gather(2, index) & (node < M)[:, None]) | (node < 0)[:, None]

    def _positions_of(self, held: Tensor, node: Tensor, depth: Tensor) -> Tensor:
        """(B, S) int64, the position of each slot's token."""
        M = depth.shape[1]
        drafted = self.base + depth.gather(1, node.clamp(0, M - 1).expand(len(depth), -1))
        return torch.where((node >= 0) & (node < M), drafted, held)


class CachedRows:
    """Rows that grow by known tokens, or by a draft of which a part is kept.

    Args:
        spans: how far back each layer looks (see `SpeculativeCache`).

    Attributes:
        cache: the keys and values. pending: draft nodes written behind the rows and not committed. sized: passes over
            drafts are of tensors whose sizes are few. device_lengths: (B, 1) int64, the rows' lengths on the device, while a
            pass is made that may be replayed for rows of other lengths; None: `lengths` say it.
    """

    sized = False
    device_lengths: Tensor | None = None

    def __init__(self, spans: Sequence[Span] = (Span(),)) -> None:
        self.spans = spans
        self.start(0)

    @property
    def rows(self) -> CachedRows:
        """These, as whoever runs a model over them calls them."""
        return self

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def aligned(self) -> bool:
        """All rows have one length."""
        return len(set(self.lengths)) == 1

    def sees_all(self, width: int, chain: bool) -> bool:
        """One token per row, behind rows of one length (and a chain of pending nodes): it sees whatever is there."""
        end = max(self.lengths) + self.pending + 1
        near = all(span.window is None or end <= span.window for span in self.spans)
        return width == 1 and self.aligned and near and (chain or not self.pending)

    def start(self, batch_size: int, keeps_all: bool = False) -> None:
        """Forget everything; the next rows are `batch_size` empty ones. keeps_all: see `SpeculativeCache`."""
        self.cache = SpeculativeCache(batch_size, self.spans, keeps_all, self.sized)
        self.pending = 0

    def place_known(self, width: int, pads: Sequence[int], device: torch.device) -> VisibleSlots:
        """Place `width` known tokens behind the rows, row b's first `pads[b]` being padding."""
        if not any(pads) and self.aligned:
            start = self.lengths[0]
            positions = start + torch.arange(width, device=device).expand(len(pads), width)
            self.cache.place(positions[:1, :1], 0, None, pads, width, draft=False)
            return VisibleSlots(self.cache, positions, positions[:1, :1], alone=start == 0)
        base, padding = uploaded([self.lengths, list(pads)], device)[..., None]  # (B, 1) each
        place = torch.arange(width, device=device) - padding  # (B, width)
        # Padding, where negative, rotates behind the row: its slots are never committed and soon overwritten. It stands
        # at the row's last position: there may be none after it.
        self.cache.place(base, 0, base + place.remainder(width), pads, width, draft=False)
        return VisibleSlots(self.cache, (base + place.clamp(min=-1)).clamp(min=0), base)

    def place_behind(self, width: int, pads: Tensor) -> VisibleSlots:
        """`place_known` behind the rows as they are `device_lengths`, which then are longer; pads: (B, 1) int64."""
        assert self.device_lengths is not None
        place = torch.arange(width, device=pads.device) - pads
        base, self.device_lengths = self.device_lengths, self.device_lengths + width - pads
        self.cache.place(base, 0, base + place.remainder(width), [0] * len(pads), width, draft=True)
        return VisibleSlots(self.cache, base + place.clamp(min=0), base)

    def place_draft(self, depth: Tensor, ancestors: Tensor, chain: bool = False) -> VisibleSlots:
        """Place n draft nodes behind the rows and behind the M nodes already pending.

        Args:
            depth: (B, M + n) int64, position = length + depth. ancestors: (B, n, M + n) bool, what each node sees.
            chain: all of them form one path in order, in every row.
        """
        n = ancestors.shape[1]
        together = self.aligned and not self.sized
        if self.device_lengths is None:
            base = uploaded(self.lengths[:1] if together else self.lengths, depth.device)[:, None]
        else:
            base = self.device_lengths
        order = None if together else base + self.pending + torch.arange(n, device=depth.device)
        self.cache.place(base, self.pending, order, [0] * len(depth), n, draft=True)
        self.cache.states.place_draft(ancestors, chain, self.lengths, self.cache.floors)
        return VisibleSlots(self.cache, base + depth[:, self.pending :], base, depth, ancestors)

    def reserve(self, more: int) -> Hashable:
        """Make room for so many tokens more per row, that passes which are replayed need not; where they find it."""
        self.cache.reserve(more)
        return self.cache.sizes

    def commit(self, growth: Sequence[int], path: Tensor | None = None) -> None:
        """Keep the first `growth[b]` of the pending nodes, or of `path` (B, D) through them; forget the others."""
        self.cache.commit(growth, path)
        self.pending = 0

    def commit_path(self, paths: Sequence[Sequence[int]], device: torch.device) -> None:
        """Keep these of the pending nodes, row by row and in this order; forget the others."""
        most = max(map(len, paths))
        if all(path == list(range(len(path))) for path in map(list, paths)):
            self.commit([len(path) for path in paths])
        else:
            padded = [[*path, *range(len(path), most)] for path in paths]
            self.commit([len(path) for path in paths], uploaded(padded, device))

    def truncate(self, lengths: Sequence[int], floors: Sequence[int] | None = None) -> None:
        """Roll each row back to at most `lengths[b]` tokens. floors: it may later be rolled back to so many."""
        self.cache.lengths = [min(have, most) for have, most in zip(self.lengths, lengths, strict=True)]
        self.cache.floors = None if floors is None else [min(f, n) for f, n in zip(floors, self.lengths, strict=True)]


def pads_of_part(pads: Sequence[int], start: int, width: int) -> list[int]:
    """How much of `width` columns from `start` on is padding, of rows left-padded by `pads`."""
    return [min(max(pad - start, 0), width) for pad in pads]
