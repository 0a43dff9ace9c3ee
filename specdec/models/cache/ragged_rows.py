"""`CachedRows`: rows of different lengths in one cache, the slots that a pass writes and those that its tokens see.

`ModelRunner` and the runners of draft heads are built on it. A pass is run over *known tokens*, which belong to the
text, or over *draft nodes*, which may be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.models.cache.buffers import Span
from specdec.models.cache.kv_cache import SpeculativeCache
from specdec.models.cache.recurrent_states import States
from specdec.utils.device_copies import uploaded

MOST_AHEAD = 2**14  # slots of all rows that are allocated before they are needed
Made = TypeVar("Made")


@dataclass(frozen=True)
class VisibleSlots:
    """Slots that the n tokens of a pass see, their own included.

    Attributes:
        cache: the cache that they are placed in.
        positions: (B, n) int64, positions of the tokens.
        base: (B, 1) int64, the rows' lengths; (1, 1) if all are equal.
        depth: (B, M + n) int64, see `CachedRows.place_draft`. None for known tokens and for a chain, which see all
            tokens before them.
        ancestors: (B, n, M + n) bool, likewise.
        alone: True if plain causal attention over these tokens gives the same result, sliding windows aside.
        whole: all nodes of a chain that were placed together with these, if passes run them one by one.
        part: these nodes among them.
    """

    cache: SpeculativeCache
    positions: Tensor
    base: Tensor
    depth: Tensor | None = None
    ancestors: Tensor | None = None
    alone: bool = False
    whole: VisibleSlots | None = None
    part: slice = field(default_factory=lambda: slice(None))
    _made: dict[Hashable, Any] = field(default_factory=dict)  # by `once`

    def once(self, name: Hashable, made: Callable[[VisibleSlots], Made]) -> Made:
        """Compute something for all nodes that were placed together, once; `part` selects those of this pass."""
        if self.whole is None:
            return made(self)  # not kept, since masks of prompts are large
        if name not in self.whole._made:
            self.whole._made[name] = made(self.whole)
        return self.whole._made[name]

    def nodes(self, part: slice) -> VisibleSlots:
        """Some of the nodes, which a pass runs."""
        return VisibleSlots(self.cache, self.positions[:, part], self.base, whole=self, part=part)

    def visible(self, span: Span) -> Tensor:
        """Mask (B, n, S) bool over the slots that layers of this span read. No intermediate is larger."""
        return self.once(span, lambda placed: placed._visible(span))[:, self.part]

    def _visible(self, span: Span) -> Tensor:
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
        """Position (B or 1, S) int64 of the token in each slot that layers of this span read."""
        slots = self._slots(span)
        return slots if self.depth is None else self._positions_of(slots, slots - self.base, self.depth)

    def _slots(self, span: Span) -> Tensor:
        """Positions as in `held`, but with draft nodes numbered from `base` on, in the order they were written."""
        return self.cache.held(span, self.positions.device)

    def _of_draft(self, node: Tensor, ancestors: Tensor) -> Tensor:
        """Mask (B, n, S) bool of the slots that hold a committed token or an ancestor."""
        n, M = ancestors.shape[1:]
        index = node.clamp(0, M - 1)[:, None].expand(len(ancestors), n, -1)
        return (ancestors.gather(2, index) & (node < M)[:, None]) | (node < 0)[:, None]

    def _positions_of(self, held: Tensor, node: Tensor, depth: Tensor) -> Tensor:
        """Position (B, S) int64 of each slot's token."""
        M = depth.shape[1]
        drafted = self.base + depth.gather(1, node.clamp(0, M - 1).expand(len(depth), -1))
        return torch.where((node >= 0) & (node < M), drafted, held)


class CachedRows:
    """Rows that grow by known tokens, or by the committed part of a draft.

    Args:
        spans: attention span of each layer (see `SpeculativeCache`).

    Attributes:
        cache: keys, values and states of the rows.
        pending: number of draft nodes written after each row and not committed.
        sized: draft passes use tensors of few sizes.
        kind_of_states: class of the recurrent states.
        device_lengths: (B, 1) int64, the rows' lengths on the device during a pass that may be replayed for rows of
            other lengths; None: `lengths` holds them.
    """

    sized = False
    kind_of_states = States
    device_lengths: Tensor | None = None
    _chain: VisibleSlots | None = None  # placed as a whole by the first of the passes over its nodes

    def __init__(self, spans: Sequence[Span] = (Span(),)) -> None:
        self.spans = spans
        self.start(0)

    @property
    def rows(self) -> CachedRows:
        """Self. Lets a runner and its rows be used interchangeably."""
        return self

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def aligned(self) -> bool:
        """True if all rows have one length."""
        return len(set(self.lengths)) == 1

    def sees_all(self, width: int, chain: bool) -> bool:
        """True if the next pass is one token per row that sees every slot of rows of one length."""
        end = max(self.lengths) + self.pending + 1
        near = all(span.window is None or end <= span.window for span in self.spans)
        return width == 1 and self.aligned and near and (chain or not self.pending)

    def start(self, batch_size: int, keeps_all: bool = False) -> None:
        """Replace the rows with `batch_size` empty ones; keeps_all: see `SpeculativeCache`."""
        self.cache = SpeculativeCache(batch_size, self.spans, keeps_all, self.sized, self.kind_of_states)
        self.pending = 0

    def place_known(self, width: int, pads: Sequence[int], device: torch.device) -> VisibleSlots:
        """Place `width` known tokens after the rows, of which the first `pads[b]` are padding."""
        if not any(pads) and self.aligned:
            start = self.lengths[0]
            positions = start + torch.arange(width, device=device).expand(len(pads), width)
            self.cache.place(positions[:1, :1], 0, None, pads, width, draft=False)
            return VisibleSlots(self.cache, positions, positions[:1, :1], alone=start == 0)
        base, padding = uploaded([self.lengths, list(pads)], device)[..., None]  # (B, 1) each
        place = torch.arange(width, device=device) - padding  # (B, width)
        # Padding has negative places. It is rotated to slots after the row, which are never committed and soon
        # overwritten. Its position is the row's last one, because there may be none after it.
        self.cache.place(base, 0, base + place.remainder(width), pads, width, draft=False)
        return VisibleSlots(self.cache, (base + place.clamp(min=-1)).clamp(min=0), base)

    def place_after(self, width: int, pads: Tensor) -> VisibleSlots:
        """Place known tokens after the rows of `device_lengths`, which then grow; pads: (B, 1) int64."""
        assert self.device_lengths is not None
        place = torch.arange(width, device=pads.device) - pads
        base, self.device_lengths = self.device_lengths, self.device_lengths + width - pads
        self.cache.place(base, 0, base + place.remainder(width), [0] * len(pads), width, draft=True)
        return VisibleSlots(self.cache, base + place.clamp(min=0), base)

    @contextmanager
    def on_device(self, lengths: Tensor) -> Iterator[None]:
        """Context in which the rows have these lengths (B, 1) int64 on the device, so that passes can be captured.

        Replays of these passes can have other lengths. No nodes are pending before or after.
        """
        self.device_lengths, self.pending = lengths, 0
        try:
            yield
        finally:
            self.device_lengths, self._chain, self.pending = None, None, 0

    def place_draft(
        self, depth: Tensor, ancestors: Tensor | None = None, width: int | None = None, count: int | None = None
    ) -> VisibleSlots:
        """Place n draft nodes after the rows and after the M nodes already pending. They are pending from now on.

        Args:
            depth: (B, M + n) int64, depth of the pending and the new nodes: position = length + depth. Of a chain also
                of nodes to come.
            ancestors: (B, n, M + n) bool, nodes that each new node sees, itself included. None if all nodes form one
                path in order, in every row.
            width: n. None: all nodes that are not pending.
            count: number of these nodes that count; the others only fill up the pass. None: all.
        """
        start, n = self.pending, depth.shape[1] - self.pending if width is None else width
        self.pending += n if count is None else count
        if self.device_lengths is None or ancestors is not None:
            return self._placed(depth[:, : start + n], ancestors, start)
        if not start:
            self._chain = self._placed(depth, None, 0)
        assert self._chain is not None
        self.cache.run_part(slice(start, start + n))
        return self._chain.nodes(slice(start, start + n))

    def _placed(self, depth: Tensor, ancestors: Tensor | None, pending: int) -> VisibleSlots:
        """Place the nodes after the `pending` ones, see `place_draft`."""
        n = depth.shape[1] - pending
        together = self.aligned and not self.sized
        if self.device_lengths is None:
            base = uploaded(self.lengths[:1] if together else self.lengths, depth.device)[:, None]
        else:
            base = self.device_lengths
        order = None if together else base + torch.arange(pending, pending + n, device=depth.device)
        self.cache.place(base, pending, order, [0] * len(depth), n, draft=True)
        if self.cache.states.parts:
            path = torch.ones(len(depth), n, pending + n, dtype=torch.bool, device=depth.device).tril(pending)
            seen, chain = (path, True) if ancestors is None else (ancestors, False)
            self.cache.states.place_draft(seen, chain, self.lengths, self.cache.floors)
        positions = base + depth[:, pending:]
        return VisibleSlots(self.cache, positions, base, None if ancestors is None else depth, ancestors)

    def reserve(self, more: int, left: Sequence[int] | None = None) -> Hashable:
        """Allocate slots, which replayed passes cannot do; return the buffers' sizes.

        Args:
            more: tokens that the next passes write to each row.
            left: tokens by which each row may still grow in this call. Slots for all of them are allocated at once, up
                to `MOST_AHEAD`: with buffers of another size passes would have to be captured again.
        """
        end = 0
        if left is not None:
            end = max(length + tokens for length, tokens in zip(self.lengths, left, strict=True)) + more
        self.cache.reserve(more, min(end, MOST_AHEAD // max(1, len(self.lengths))))
        return self.cache.sizes

    def replayed(self, growth: Sequence[int], pending: int) -> None:
        """Take over what a replay has written: `growth[b]` known tokens per row, then `pending` draft nodes."""
        self.commit(growth)
        self.pending = pending

    def drop_draft(self) -> None:
        """Drop the pending nodes."""
        self.pending = 0

    def commit(self, growth: Sequence[int], path: Tensor | None = None) -> None:
        """Commit the first `growth[b]` pending nodes, or those of `path` (B, D) through them; drop the others."""
        self.cache.commit(growth, path)
        self.pending = 0

    def commit_path(self, paths: Sequence[Sequence[int]], device: torch.device) -> None:
        """Commit these pending nodes of each row, in this order; drop the others."""
        most = max(map(len, paths))
        if all(path == list(range(len(path))) for path in map(list, paths)):
            self.commit([len(path) for path in paths])
        else:
            padded = [[*path, *range(len(path), most)] for path in paths]
            self.commit([len(path) for path in paths], uploaded(padded, device))

    def truncate(self, lengths: Sequence[int], floors: Sequence[int] | None = None) -> None:
        """Roll each row back to at most `lengths[b]` tokens; floors: length to which it may be rolled back later."""
        self.cache.truncate(lengths, floors)


def pads_of_part(pads: Sequence[int], start: int, width: int) -> list[int]:
    """Count the padding among `width` columns from `start` on, for rows left-padded by `pads`."""
    return [min(max(pad - start, 0), width) for pad in pads]
