"""`RecordedDrafts`: whole drafts as one launch: catching up with the text, a pass per depth, the tree of what came out.

Owns what such a draft is told beforehand instead of finding out on the way: how deep it goes, by past rounds. What it
does is `AutoregressiveProposer`'s own code, run over inputs that stay in one place (`recording`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from specdec.models.cache.ragged_rows import CachedRows
from specdec.proposers.base import Context
from specdec.proposers.draft_models.autoregressive import AutoregressiveProposer
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.noise import Noise
from specdec.sampling.results import NewTokens
from specdec.utils.device_copies import uploaded

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # that are recorded, where nobody set one
WIDTHS = (8, 16)  # tokens of the text that are read at once: what a round brings, padded on the left


@dataclass(frozen=True)
class LaunchedDraft:
    """A draft that the device was asked for.

    Attributes:
        made: of it, by name. depth: how deep it goes. key: of what was run, see `RecordedDrafts._pending`.
    """

    made: Mapping[str, Tensor]
    depth: int
    key: object


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
        """Take in tokens (B, W), row b left-padded by pads[b], behind the rows as they are `device_lengths`; logits (B, 1, K)
        after them. pads: (B, 1) int64."""

    def begin(self, context: Context) -> None:
        super().begin(context)
        self._pending: dict[object, int] = {}  # nodes that what drafts was run over, by draft: replays do not count
        self._ahead: LaunchedDraft | None = None
        self._width = WIDTHS[0]  # tokens that are read at once: it grows, so that few are recorded

    def propose(self, context: Context) -> DraftTree:
        try:
            return super().propose(context)
        finally:
            self._ahead = None

    def _draft(self, context: Context, limit: int) -> DraftTree:
        chain, ahead = self._in_chains(context), self._ahead
        depth = self._depth(context, chain) if ahead is None else ahead.depth
        newest = self._newest(context, WIDTHS[-1]) if depth else None
        if newest is None:
            return super()._draft(context, limit)
        missing, states = newest
        launched = ahead or self._replayed(context, depth, chain, self._inputs(context, depth, missing, states))
        return self._taken(context, launched, chain, missing)

    def _draft_ahead(self, context: Context, new_tokens: NewTokens) -> None:
        """See `Proposer.draft_ahead`: for what keeps nothing of its drafts."""
        chain = self._in_chains(context)
        depth = self._depth(context, chain) if new_tokens.tokens.shape[1] <= WIDTHS[-1] else 0
        if depth:
            self._ahead = self._replayed(context, depth, chain, self._inputs_ahead(context, depth, new_tokens))

    def _book_recorded(self, context: Context, depth: int) -> None:
        for _ in range(depth):
            context.pacer.launched_draft_pass()

    def _depth(self, context: Context, chain: bool) -> int:
        """Of a draft that can be recorded, by what past rounds say; 0: it cannot."""
        recorder, pacer = context.recorder, context.pacer
        if recorder is None or recorder.refused or self._draws(context) or not context.processors.read_scores_alone:
            return 0
        limit = self._deepest(pacer)
        if not chain:
            if self.tree is None:
                return 0
            limit = min(limit, self.tree.depth)
        depth, rate = 0 if chain else 1, pacer.expected_rate
        while depth < limit:
            reaching = [rate ** (depth + 1) if active else 0.0 for active in context.active]
            if not pacer.worth(reaching, depth, draft_steps=min(1, depth)):
                break
            depth += 1
        return depth if pacer.length is not None else max(size for size in (0, *DEPTHS) if size <= depth)

    def _inputs(self, context: Context, depth: int, missing: Sequence[int], states: Tensor | None) -> dict[str, Tensor]:
        """What `_made` is of, as far as it is data."""
        width = self._wide_enough(max(missing))
        pads = [width - count for count in missing]
        budget = [budget + count for budget, count in zip(context.drafting_budget, missing, strict=True)]
        begins, device_budget, device_pads = uploaded([self._begins(context), budget, pads], context.tokens.device)
        inputs = {"tokens": context.last_tokens(width), "begins": begins, "budget": device_budget, "pads": device_pads}
        if states is not None:
            more = width - states.shape[1]
            inputs["states"] = nn.functional.pad(states, (0, 0, more, 0)) if more >= 0 else states[:, -width:]
        if context.noise is not None:
            first = [end - context.start for end in context.ends]
            inputs["noise"] = context.noise.ahead(first, depth)
        return inputs

    def _inputs_ahead(self, context: Context, depth: int, new_tokens: NewTokens) -> dict[str, Tensor]:
        """The same behind what the rows gain in this round."""
        most = self._wide_enough(new_tokens.tokens.shape[1])
        new_tokens = new_tokens.padded(most)
        begins, budget = uploaded([self._begins(context), context.drafting_budget], new_tokens.pads.device)
        inputs = {"tokens": new_tokens.tokens, "begins": begins, "budget": budget, "pads": new_tokens.pads}
        if new_tokens.states is not None:
            inputs["states"] = new_tokens.states
        if context.noise is not None:
            first = [end - context.start + 1 for end in context.ends]
            noise = context.noise.ahead(first, most - 1 + depth)
            place = torch.arange(depth, device=noise.device) + (most - 1 - new_tokens.pads)[:, None]
            inputs["noise"] = noise.gather(1, place[..., None].expand(-1, -1, noise.shape[-1]))
        return inputs

    def _wide_enough(self, most: int) -> int:
        self._width = min(size for size in WIDTHS if size >= max(most, self._width))
        return self._width

    def _begins(self, context: Context) -> list[int]:
        """The rows' lengths. A row that is done may have no positions left: what is run for it, and for nothing, is run
        at the first ones."""
        drafting = set(context.rows)
        return [length if b in drafting else 0 for b, length in enumerate(self.rows.lengths)]

    def _replayed(self, context: Context, depth: int, chain: bool, inputs: Mapping[str, Tensor]) -> LaunchedDraft:
        assert context.recorder is not None
        wide = 1 if chain or self.tree is None else self.tree.top_k
        sizes = self.rows.reserve(inputs["tokens"].shape[1] + max(depth * wide, self._widest_pass))
        key = (type(self).__name__, context.processors.names, chain, depth, sizes)
        function = partial(self._made, context, depth, chain, key)
        if self.rows.cache.filled:
            return LaunchedDraft(context.recorder(self.rows, key, function, inputs), depth, key)
        return LaunchedDraft(function(**inputs), depth, key)  # it makes the buffers that replays write to

    def _taken(self, context: Context, launched: LaunchedDraft, chain: bool, missing: Sequence[int]) -> DraftTree:
        """For this round; missing: how many tokens of each row were read for it."""
        rows, drafting = self.rows, set(context.rows)
        rows.cache.lengths = [length + count for length, count in zip(rows.lengths, missing, strict=True)]
        rows.pending = self._pending[launched.key]
        self._book_recorded(context, launched.depth)
        draft = _as_draft(launched.made, chain, launched.depth)
        if len(drafting) < len(rows.lengths):
            done = uploaded([b not in drafting for b in range(len(rows.lengths))], draft.parents.device).bool()
            draft = replace(draft, parents=draft.parents.masked_fill(done[:, None], -1))
        if chain:
            self._stepped = launched.depth - 1
            return draft
        assert self.tree is not None
        return _first(draft, self._size(context, self.tree, draft.size - 1), context)

    def _made(
        self,
        context: Context,
        depth: int,
        chain: bool,
        key: object,
        tokens: Tensor,
        begins: Tensor,
        budget: Tensor,
        pads: Tensor,
        states: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """What is recorded. begins, budget: (B,) int64, length and room before the tokens (B, W). pads: (B,), theirs."""
        (B, W), rows = tokens.shape, self.rows
        still = replace(
            context,
            tokens=tokens,
            pads=[0] * B,
            ends=[W] * B,
            active=[True] * B,
            budget=[depth] * B,
            device_budget=(budget - W + pads).clamp(min=0),
            pacer=Decided(depth, chain),
            features=None,
            noise=None if noise is None else GivenNoise(noise),
            start=W,
        )
        rows.device_lengths, rows.pending = begins[:, None], 0
        try:
            logits = self._read_behind(tokens, states, pads[:, None])
            draft = self._grown(still, logits, depth)
        finally:
            rows.device_lengths = None
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


def _as_tensors(draft: DraftTree) -> dict[str, Tensor]:
    """All of a deterministic draft, by name."""
    confidence_bins = {} if draft.confidence_bins is None else {"confidence_bins": draft.confidence_bins}
    notes = {f"note {name}": note for name, note in draft.notes.items()}
    return {"tokens": draft.tokens, "parents": draft.parents, **confidence_bins, **notes}


def _as_draft(made: Mapping[str, Tensor], chain: bool, depth: int) -> DraftTree:
    notes = {name.removeprefix("note "): note for name, note in made.items() if name.startswith("note ")}
    levels = None if chain else depth
    return DraftTree(
        made["tokens"],
        made["parents"],
        chain=chain,
        confidence_bins=made.get("confidence_bins"),
        levels=levels,
        notes=notes,
    )


def _first(draft: DraftTree, size: int, context: Context) -> DraftTree:
    """The first `size` nodes behind the root: parents come before their children, and the most probable first."""
    if size == 0:
        return DraftTree.root_only(context.root)
    notes = {**draft.notes, "steps": draft.notes["steps"][:, : 1 + size]}
    return replace(draft.first(1 + size), notes=notes)
