"""`CapturedDraft`: captures whole drafts as CUDA graphs: catching up with the text, a pass per depth, and the tree.

A draft's depth is fixed before capture, from the acceptance of past rounds, because a replayed graph cannot branch on
values. The captured code is the drafter's own, run over buffers with fixed addresses (`models.cuda_graphs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from specdec.models.cache.ragged_rows import CachedRows
from specdec.proposers.context import Context
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import DynamicTree
from specdec.sampling.noise import Noise
from specdec.sampling.results import NewTokens
from specdec.utils.device_copies import uploaded

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # depths that are captured when the draft length is automatic
WIDTHS = (8, 16)  # padded numbers of new tokens per row that a captured draft processes first


class Drafter(Protocol):
    """Methods of an `AutoregressiveProposer` that a captured draft calls."""

    tree: DynamicTree | None

    @property
    def rows(self) -> CachedRows:
        """The cached rows of the drafting model or head."""

    @property
    def widest_pass(self) -> int:
        """Cache slots that one pass writes after the text, if more than the draft's nodes: a block's size."""

    def newest(self, context: Context, most: int) -> tuple[Sequence[int], Tensor | None] | None:
        """Take each row's number of unprocessed tokens, and the target's states (B, W, C) for them, left-padded.

        They count as processed afterwards. None if there are more than `most`, or if the draft cannot be captured.
        """

    def read_after(self, tokens: Tensor, states: Tensor | None, pads: Tensor) -> Tensor:
        """Process tokens (B, W) after the rows, whose lengths are `device_lengths`; logits (B, 1, K) after them.

        Args:
            tokens: (B, W) int64, row b left-padded by pads[b].
            states: (B, W, C), the target's states for the tokens; None for a draft model.
            pads: (B, 1) int64.
        """

    def grow_draft(self, context: Context, logits: Tensor, limit: int) -> DraftTree:
        """Grow the draft from the logits (B, 1, K) after the roots, down to depth `limit`."""

    def drafts_chains(self, context: Context) -> bool:
        """Return whether to draft chains."""

    def draws_from_q(self, context: Context) -> bool:
        """Return whether tokens are drawn, which is not captured."""

    def deepest(self, pacer: Pacer) -> int:
        """The largest depth of a draft."""

    def tree_size(self, context: Context, tree: DynamicTree, count: int) -> int:
        """The number of candidates to verify, out of `count`."""

    def count_passes(self, context: Context, depth: int) -> None:
        """Report the passes of a captured draft to the pacer."""


@dataclass(frozen=True)
class LaunchedDraft:
    """A draft launched on the device.

    Attributes:
        made: its tensors, by name.
        depth: its depth.
        key: the key of the captured function, see `CapturedDraft._pending`.
    """

    made: Mapping[str, Tensor]
    depth: int
    key: object


class CapturedDraft:
    """The captured drafts of one call.

    A draft is captured if the call has a `Recorder`, the draft is deterministic and no logits processor reads the text.
    """

    def __init__(self) -> None:
        self._pending: dict[object, int] = {}  # nodes in the draft's cache by key, since a replay does not count them
        self._ahead: LaunchedDraft | None = None
        self._width = WIDTHS[0]  # current padded width; it only grows, which keeps captures few

    def __call__(self, drafter: Drafter, context: Context) -> DraftTree | None:
        """Return the draft of a round, launched ahead or now; None if it has to be drafted eagerly."""
        chain, ahead = drafter.drafts_chains(context), self._ahead
        depth = self._depth(drafter, context, chain) if ahead is None else ahead.depth
        newest = drafter.newest(context, WIDTHS[-1]) if depth else None
        if newest is None:
            return None
        missing, states = newest
        inputs = {} if ahead else self._inputs(drafter, context, depth, missing, states)
        launched = ahead or self._replayed(drafter, context, depth, chain, inputs)
        return self._taken(drafter, context, launched, chain, missing)

    def draft_ahead(self, drafter: Drafter, context: Context, new_tokens: NewTokens) -> None:
        """Launch the next draft, see `Proposer.draft_ahead`. For proposers that drop their drafts after a round."""
        chain = drafter.drafts_chains(context)
        depth = self._depth(drafter, context, chain) if new_tokens.tokens.shape[1] <= WIDTHS[-1] else 0
        if depth:
            inputs = self._inputs_ahead(drafter, context, depth, new_tokens)
            self._ahead = self._replayed(drafter, context, depth, chain, inputs)

    def forget(self) -> None:
        """Drop the draft that was launched ahead: it belongs to one round."""
        self._ahead = None

    def _depth(self, drafter: Drafter, context: Context, chain: bool) -> int:
        """The depth of the next captured draft, estimated from past rounds; 0: it cannot be captured."""
        recorder, pacer = context.call.recorder, context.pacer
        if (
            recorder is None
            or recorder.refused
            or drafter.draws_from_q(context)
            or not context.call.processors.read_scores_alone
        ):
            return 0
        limit = drafter.deepest(pacer)
        if not chain:
            if drafter.tree is None:
                return 0
            limit = min(limit, drafter.tree.depth)
        depth, rate = 0 if chain else 1, pacer.expected_rate
        while depth < limit:
            reaching = [rate ** (depth + 1) if active else 0.0 for active in context.active]
            if not pacer.worth(reaching, depth, draft_steps=min(1, depth)):
                break
            depth += 1
        return depth if pacer.length is not None else max(size for size in (0, *DEPTHS) if size <= depth)

    def _inputs(
        self, drafter: Drafter, context: Context, depth: int, missing: Sequence[int], states: Tensor | None
    ) -> dict[str, Tensor]:
        """The tensor inputs of `_made`, by name."""
        width = self._wide_enough(max(missing))
        pads = [width - count for count in missing]
        budget = [budget + count for budget, count in zip(context.drafting_budget, missing, strict=True)]
        begins, device_budget, device_pads = uploaded([_begins(drafter, context), budget, pads], context.tokens.device)
        inputs = {"tokens": context.last_tokens(width), "begins": begins, "budget": device_budget, "pads": device_pads}
        if states is not None:
            more = width - states.shape[1]
            inputs["states"] = nn.functional.pad(states, (0, 0, more, 0)) if more >= 0 else states[:, -width:]
        if context.call.noise is not None:
            first = [end - context.call.start for end in context.ends]
            inputs["noise"] = context.call.noise.ahead(first, depth)
        return inputs

    def _inputs_ahead(self, drafter: Drafter, context: Context, depth: int, new_tokens: NewTokens) -> dict[str, Tensor]:
        """The tensor inputs of `_made` for a draft after this round's new tokens."""
        most = self._wide_enough(new_tokens.tokens.shape[1])
        new_tokens = new_tokens.padded(most)
        begins, budget = uploaded([_begins(drafter, context), context.drafting_budget], new_tokens.pads.device)
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

    def _replayed(
        self, drafter: Drafter, context: Context, depth: int, chain: bool, inputs: Mapping[str, Tensor]
    ) -> LaunchedDraft:
        """Launch a draft with the call's recorder."""
        assert context.call.recorder is not None
        wide = 1 if chain or drafter.tree is None else drafter.tree.top_k
        sizes = drafter.rows.reserve(inputs["tokens"].shape[1] + max(depth * wide, drafter.widest_pass))
        key = (type(drafter).__name__, context.call.processors.names, chain, depth, sizes)
        function = partial(self._made, drafter, context, depth, chain, key)
        if drafter.rows.cache.filled:
            return LaunchedDraft(context.call.recorder(drafter.rows, key, function, inputs), depth, key)
        return LaunchedDraft(function(**inputs), depth, key)  # the first run allocates the buffers for replays

    def _taken(
        self, drafter: Drafter, context: Context, launched: LaunchedDraft, chain: bool, missing: Sequence[int]
    ) -> DraftTree:
        """Return the launched draft for this round. missing: tokens of each row that were processed for it."""
        rows, drafting = drafter.rows, set(context.rows)
        rows.replayed(missing, self._pending[launched.key])
        drafter.count_passes(context, launched.depth)
        draft = _as_draft(launched.made, chain, launched.depth)
        if len(drafting) < len(rows.lengths):
            done = uploaded([b not in drafting for b in range(len(rows.lengths))], draft.parents.device).bool()
            draft = replace(draft, parents=draft.parents.masked_fill(done[:, None], -1))
        if chain or drafter.tree is None:
            return draft
        return _first(draft, drafter.tree_size(context, drafter.tree, draft.size - 1), context)

    def _made(
        self,
        drafter: Drafter,
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
            drafter: the proposer.
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
        (B, W), rows = tokens.shape, drafter.rows
        still = replace(
            context,
            tokens=tokens,
            pads=[0] * B,
            ends=[W] * B,
            active=[True] * B,
            budget=[depth] * B,
            pacer=FixedDepth(depth, chain),
            features=None,
            call=replace(
                context.call,
                noise=None if noise is None else FixedNoise(noise),
                start=W,
                device_budget=(budget - W + pads).clamp(min=0),
            ),
        )
        with rows.on_device(begins[:, None]):
            logits = drafter.read_after(tokens, states, pads[:, None])
            draft = drafter.grow_draft(still, logits, depth)
            self._pending[key] = rows.pending
        return _as_tensors(draft)


def _begins(drafter: Drafter, context: Context) -> list[int]:
    """The rows' lengths, 0 for finished rows: these may have no positions left, and their nodes are ignored."""
    drafting = set(context.rows)
    return [length if b in drafting else 0 for b, length in enumerate(drafter.rows.lengths)]


class FixedDepth(Pacer):
    """A pacer with a fixed depth: answers every question with it and discards all observations."""

    def __init__(self, depth: int, chain: bool):
        super().__init__(None if chain else depth)  # a chain records its confidence only without a fixed length
        self.depth = depth

    def worth(self, chances: Sequence[float], drafted: int, draft_steps: int = 0) -> bool:
        return drafted < self.depth


class FixedNoise(Noise):
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
