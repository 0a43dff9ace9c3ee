"""`RecordedDrafts`: captures whole drafts as CUDA graphs: catching up with the text, a pass per depth, and the tree.

A draft's depth is fixed before capture, from the acceptance of past rounds, because a replayed graph cannot branch on
values. The captured code is `AutoregressiveProposer`'s, run over buffers with fixed addresses (`models.cuda_graphs`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from specdec.models.cache.ragged_rows import CachedRows
from specdec.proposers.context import Context
from specdec.proposers.draft_models.autoregressive import AutoregressiveProposer
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.noise import Noise
from specdec.sampling.results import NewTokens
from specdec.utils.device_copies import uploaded

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # depths that are captured when the draft length is automatic
WIDTHS = (8, 16)  # padded numbers of new tokens per row that a captured draft processes first


@dataclass(frozen=True)
class LaunchedDraft:
    """A draft launched on the device.

    Attributes:
        made: its tensors, by name.
        depth: its depth.
        key: the key of the captured function, see `RecordedDrafts._pending`.
    """

    made: Mapping[str, Tensor]
    depth: int
    key: object


class RecordedDrafts(AutoregressiveProposer):
    """Base class of proposers whose chains and dynamic trees can be captured as CUDA graphs.

    A draft is captured if the call has a `Recorder`, the draft is deterministic and no logits processor reads the text.
    All other drafts run eagerly, as in `AutoregressiveProposer`.
    """

    @property
    @abstractmethod
    def rows(self) -> CachedRows:
        """The cached rows of the drafting model or head."""

    @property
    def _widest_pass(self) -> int:
        """Cache slots that one pass writes after the text, if more than the draft's nodes: a block's size."""
        return 0

    @abstractmethod
    def _newest(self, context: Context, most: int) -> tuple[Sequence[int], Tensor | None] | None:
        """Take each row's number of unprocessed tokens, and the target's states (B, W, C) for them, left-padded.

        They count as processed afterwards. None if there are more than `most`, or if the states are not contiguous.
        """

    @abstractmethod
    def _read_after(self, tokens: Tensor, states: Tensor | None, pads: Tensor) -> Tensor:
        """Process tokens (B, W) after the rows, whose lengths are `device_lengths`; logits (B, 1, K) after them.

        Args:
            tokens: (B, W) int64, row b left-padded by pads[b].
            states: (B, W, C), the target's states for the tokens; None for a draft model.
            pads: (B, 1) int64.
        """

    def begin(self, context: Context) -> None:
        super().begin(context)
        self._pending: dict[object, int] = {}  # nodes in the draft's cache by key, since a replay does not count them
        self._ahead: LaunchedDraft | None = None
        self._width = WIDTHS[0]  # current padded width; it only grows, which keeps captures few

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
        """Launch the next draft, see `Proposer.draft_ahead`. For proposers that drop their drafts after a round."""
        chain = self._in_chains(context)
        depth = self._depth(context, chain) if new_tokens.tokens.shape[1] <= WIDTHS[-1] else 0
        if depth:
            self._ahead = self._replayed(context, depth, chain, self._inputs_ahead(context, depth, new_tokens))

    def _book_recorded(self, context: Context, depth: int) -> None:
        """Record the passes of a captured draft."""
        for _ in range(depth):
            context.pacer.launched_draft_pass()

    def _depth(self, context: Context, chain: bool) -> int:
        """The depth of the next captured draft, estimated from past rounds; 0: it cannot be captured."""
        recorder, pacer = context.call.recorder, context.pacer
        if (
            recorder is None
            or recorder.refused
            or self._draws(context)
            or not context.call.processors.read_scores_alone
        ):
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
        """The tensor inputs of `_made`, by name."""
        width = self._wide_enough(max(missing))
        pads = [width - count for count in missing]
        budget = [budget + count for budget, count in zip(context.drafting_budget, missing, strict=True)]
        begins, device_budget, device_pads = uploaded([self._begins(context), budget, pads], context.tokens.device)
        inputs = {"tokens": context.last_tokens(width), "begins": begins, "budget": device_budget, "pads": device_pads}
        if states is not None:
            more = width - states.shape[1]
            inputs["states"] = nn.functional.pad(states, (0, 0, more, 0)) if more >= 0 else states[:, -width:]
        if context.call.noise is not None:
            first = [end - context.call.start for end in context.ends]
            inputs["noise"] = context.call.noise.ahead(first, depth)
        return inputs

    def _inputs_ahead(self, context: Context, depth: int, new_tokens: NewTokens) -> dict[str, Tensor]:
        """The tensor inputs of `_made` for a draft after this round's new tokens."""
        most = self._wide_enough(new_tokens.tokens.shape[1])
        new_tokens = new_tokens.padded(most)
        begins, budget = uploaded([self._begins(context), context.drafting_budget], new_tokens.pads.device)
        inputs = {"tokens": new_tokens.tokens, "begins": begins, "budget": budget, "pads": new_tokens.pads}
        if new_tokens.states is not None:
            inputs["states"] = new_tokens.states
        if context.call.noise is not None:
            first = [end - context.call.start + 1 for end in context.ends]
            noise = context.call.noise.ahead(first, most - 1 + depth)
            place = torch.arange(depth, device=noise.device) + (most - 1 - new_tokens.pads)[:, None]
            inputs["noise"] = noise.gather(1, place[..., None].expand(-1, -1, noise.shape[-1]))
        return inputs

    def _wide_enough(self, most: int) -> int:
        """The padded width for `most` new tokens per row."""
        self._width = min(size for size in WIDTHS if size >= max(most, self._width))
        return self._width

    def _begins(self, context: Context) -> list[int]:
        """The rows' lengths, 0 for finished rows: these may have no positions left, and their nodes are ignored."""
        drafting = set(context.rows)
        return [length if b in drafting else 0 for b, length in enumerate(self.rows.lengths)]

    def _replayed(self, context: Context, depth: int, chain: bool, inputs: Mapping[str, Tensor]) -> LaunchedDraft:
        """Launch a draft with the call's recorder."""
        assert context.call.recorder is not None
        wide = 1 if chain or self.tree is None else self.tree.top_k
        sizes = self.rows.reserve(inputs["tokens"].shape[1] + max(depth * wide, self._widest_pass))
        key = (type(self).__name__, context.call.processors.names, chain, depth, sizes)
        function = partial(self._made, context, depth, chain, key)
        if self.rows.cache.filled:
            return LaunchedDraft(context.call.recorder(self.rows, key, function, inputs), depth, key)
        return LaunchedDraft(function(**inputs), depth, key)  # the first run allocates the buffers for replays

    def _taken(self, context: Context, launched: LaunchedDraft, chain: bool, missing: Sequence[int]) -> DraftTree:
        """Return the launched draft for this round. missing: tokens of each row that were processed for it."""
        rows, drafting = self.rows, set(context.rows)
        rows.replayed(missing, self._pending[launched.key])
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
        """The function that is captured: processes the new tokens, grows the draft and returns its tensors.

        Args:
            context: the state of the batch, whose tensors are replaced by the arguments below.
            depth: the depth of the draft.
            chain: True for a chain, False for a dynamic tree.
            key: the key of the captured function.
            tokens: (B, W) int64, the new tokens, left-padded.
            begins: (B,) int64, the length of each row before the new tokens.
            budget: (B,) int64, the budget of each row before the new tokens.
            pads: (B,) int64, the padding of each row of `tokens`.
            states: (B, W, C), the target's states for the new tokens, for proposers that read them.
            noise: (B, depth, V) float32, the noise of the columns after the root.
        """
        (B, W), rows = tokens.shape, self.rows
        still = replace(
            context,
            tokens=tokens,
            pads=[0] * B,
            ends=[W] * B,
            active=[True] * B,
            budget=[depth] * B,
            pacer=Decided(depth, chain),
            features=None,
            call=replace(
                context.call,
                noise=None if noise is None else GivenNoise(noise),
                start=W,
                device_budget=(budget - W + pads).clamp(min=0),
            ),
        )
        with rows.on_device(begins[:, None]):
            logits = self._read_after(tokens, states, pads[:, None])
            draft = self._grown(still, logits, depth)
            self._pending[key] = rows.pending
        return _as_tensors(draft)


class Decided(Pacer):
    """A pacer with a fixed depth: answers every question with it and discards all observations."""

    def __init__(self, depth: int, chain: bool):
        super().__init__(None if chain else depth)  # a chain records its confidence only without a fixed length
        self.depth = depth

    def worth(self, chances: Sequence[float], drafted: int, draft_steps: int = 0) -> bool:
        return drafted < self.depth


class GivenNoise(Noise):
    """Noise given as a tensor (B, n, V) for the n columns after the root."""

    def __init__(self, drawn: Tensor):
        self.drawn = drawn

    def at(self, columns: Sequence[int]) -> Tensor:
        return self.drawn[:, columns[0]]


def _as_tensors(draft: DraftTree) -> dict[str, Tensor]:
    """The tensors of a deterministic draft, by name."""
    confidence_bins = {} if draft.confidence_bins is None else {"confidence_bins": draft.confidence_bins}
    notes = {f"note {name}": note for name, note in draft.notes.items()}
    return {"tokens": draft.tokens, "parents": draft.parents, **confidence_bins, **notes}


def _as_draft(made: Mapping[str, Tensor], chain: bool, depth: int) -> DraftTree:
    """The inverse of `_as_tensors`."""
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
    """Cut the draft to its `size` most probable nodes after the root, which come first."""
    if size == 0:
        return DraftTree.root_only(context.root)
    notes = {**draft.notes, "steps": draft.notes["steps"][:, : 1 + size]}
    return replace(draft.first(1 + size), notes=notes)
