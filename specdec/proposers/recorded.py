"""`RecordedDrafts`: whole drafts as one launch: catching up with the text, a pass per depth, the tree of what came out.

Owns what such a draft is told beforehand instead of finding out on the way: how deep it goes, by past rounds. What it
does is `AutoregressiveProposer`'s own code, run over inputs that stay in one place (`recording`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from specdec.noise import Noise
from specdec.pacing import Pacer
from specdec.proposers.autoregressive import AutoregressiveProposer
from specdec.proposers.base import Context
from specdec.rows import CachedRows
from specdec.transfer import uploaded
from specdec.tree import DraftTree

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # that are recorded, where nobody set one
WIDTHS = (8, 16)  # tokens of the text that are read at once: what a round brings, padded on the left


class RecordedDrafts(AutoregressiveProposer):
    """Chains and dynamic trees are recorded where a call has a recorder, and neither chance nor text has a say in them.

    A subclass stands before the class that drafts without.
    """

    @property
    @abstractmethod
    def rows(self) -> CachedRows:
        """The runner of what drafts."""

    @property
    def _widest_pass(self) -> int:
        """Nodes that are written behind the text beside those of depths: a block's."""
        return 0

    @abstractmethod
    def _newest(self, context: Context, most: int) -> tuple[Sequence[int], Tensor | None] | None:
        """How many tokens of each row are to be read, and the target's states (B, W, C) with them, padded on the left.

        They count as read then. None where they are more than `most`, or states do not lie side by side.
        """

    @abstractmethod
    def _read_behind(self, tokens: Tensor, states: Tensor | None, pads: Tensor) -> Tensor:
        """Take in tokens (B, W), row b left-padded by pads[b], behind the rows as they are `there`; logits (B, 1, K)
        after them. pads: (B, 1) int64."""

    def begin(self, context: Context) -> None:
        super().begin(context)
        self._pending: dict[object, int] = {}  # nodes that what drafts was run over, by draft: replays do not count

    def _draft(self, context: Context, limit: int) -> DraftTree:
        chain = self._in_chains(context)
        depth = self._depth(context, limit, chain)
        newest = self._newest(context, WIDTHS[-1]) if depth else None
        if newest is None:
            return super()._draft(context, limit)
        draft = self._replayed(context, depth, chain, *newest)
        self._book_recorded(context, depth)
        if chain:
            self._stepped = depth - 1
            return draft
        assert self.tree is not None
        return _first(draft, self._size(context, self.tree, draft.size - 1), context)

    def _book_recorded(self, context: Context, depth: int) -> None:
        for _ in range(depth):
            context.pacer.launched_draft_pass()

    def _depth(self, context: Context, limit: int, chain: bool) -> int:
        """Of a draft that can be recorded, by what past rounds say; 0: it cannot."""
        recorder, pacer = context.recorder, context.pacer
        if recorder is None or recorder.refused or self._draws(context) or not context.processors.read_scores_alone:
            return 0
        if not chain:
            if self.tree is None:
                return 0
            limit = min(limit, self.tree.depth)
        depth, rate = 0 if chain else 1, pacer.expected_rate
        while depth < limit and pacer.worth(_reaching(context, depth, rate), depth, draft_steps=min(1, depth)):
            depth += 1
        if pacer.length is None:
            depth = max(size for size in (0, *DEPTHS) if size <= depth)
        return depth if all(context.room[b] >= depth for b in context.rows) else 0

    def _replayed(
        self, context: Context, depth: int, chain: bool, missing: Sequence[int], states: Tensor | None
    ) -> DraftTree:
        assert context.recorder is not None
        rows, width = self.rows, min(size for size in WIDTHS if size >= max(missing))
        wide = 1 if chain or self.tree is None else self.tree.top_k
        sizes = rows.reserve(width + max(depth * wide, self._widest_pass))
        lengths, drafting = rows.lengths, set(context.rows)
        # A row that is done may have no positions left: what is run for it, and for nothing, is run at the first ones.
        begins = [length if b in drafting else 0 for b, length in enumerate(lengths)]
        pads = [width - count for count in missing]
        inputs = {
            "tokens": context.last_tokens(width),
            "numbers": uploaded([begins, pads], context.tokens.device),
        }
        if states is not None:
            more = width - states.shape[1]
            inputs["states"] = nn.functional.pad(states, (0, 0, more, 0)) if more >= 0 else states[:, -width:]
        if context.noise is not None:
            first = [end - context.start for end in context.ends]
            inputs["noise"] = context.noise.ahead(first, depth)
        key = (id(rows), chain, depth, sizes)
        made = context.recorder(key, partial(self._made, context, depth, chain, key), inputs)
        rows.cache.lengths = [length + count for length, count in zip(lengths, missing, strict=True)]
        rows.pending = self._pending[key]
        draft = _as_draft(made, chain, depth)
        if len(drafting) == len(lengths):
            return draft
        done = uploaded([b not in drafting for b in range(len(lengths))], draft.parents.device).bool()
        return replace(draft, parents=draft.parents.masked_fill(done[:, None], -1))

    def _made(
        self,
        context: Context,
        depth: int,
        chain: bool,
        key: object,
        tokens: Tensor,
        numbers: Tensor,
        states: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """What is recorded. numbers: (2, B) int64, the rows' lengths before the tokens (B, W), and their padding."""
        (B, W), rows = tokens.shape, self.rows
        still = replace(
            context,
            tokens=tokens,
            pads=[0] * B,
            ends=[W] * B,
            active=[True] * B,
            room=[depth] * B,
            pacer=Decided(depth, chain),
            features=None,
            noise=None if noise is None else GivenNoise(noise),
            start=W,
        )
        rows.there, rows.pending = numbers[0, :, None], 0
        try:
            logits = self._read_behind(tokens, states, numbers[1, :, None])
            draft = self._grown(still, logits, depth)
        finally:
            rows.there = None
        self._pending[key] = rows.pending
        return _as_tensors(draft)


class Decided(Pacer):
    """Of a draft whose depth is settled: there is nothing to ask it, and nothing of what it hears is kept."""

    def __init__(self, depth: int, chain: bool):
        super().__init__(None if chain else depth)  # of a chain it is wanted how sure the draft was
        self.depth = depth

    def worth(self, chances: Sequence[float], drafted: int, draft_steps: int = 0) -> bool:
        return drafted < self.depth


class GivenNoise(Noise):
    """Of the columns behind the root, (B, n, V)."""

    def __init__(self, drawn: Tensor):
        self.drawn = drawn

    def at(self, columns: Sequence[int]) -> Tensor:
        return self.drawn[:, columns[0]]


def _reaching(context: Context, depth: int, rate: float) -> list[float]:
    """Per row, the chance that a draft's token behind `depth` others is accepted; 0 for rows that draft no further."""
    drafting = [room if active else 0 for room, active in zip(context.room, context.active, strict=True)]
    return [rate ** (depth + 1) if room > depth else 0.0 for room in drafting]


def _as_tensors(draft: DraftTree) -> dict[str, Tensor]:
    """All of a deterministic draft, by name."""
    keys = {} if draft.keys is None else {"keys": draft.keys}
    notes = {f"note {name}": note for name, note in draft.notes.items()}
    return {"tokens": draft.tokens, "parents": draft.parents, **keys, **notes}


def _as_draft(made: Mapping[str, Tensor], chain: bool, depth: int) -> DraftTree:
    notes = {name.removeprefix("note "): note for name, note in made.items() if name.startswith("note ")}
    levels = None if chain else depth
    return DraftTree(made["tokens"], made["parents"], chain=chain, keys=made.get("keys"), levels=levels, notes=notes)


def _first(draft: DraftTree, size: int, context: Context) -> DraftTree:
    """The first `size` nodes behind the root: parents come before their children, and the most probable first."""
    if size == 0:
        return DraftTree.root_only(context.root)
    notes = {**draft.notes, "steps": draft.notes["steps"][:, : 1 + size]}
    return replace(draft, tokens=draft.tokens[:, : 1 + size], parents=draft.parents[:, : 1 + size], notes=notes)
