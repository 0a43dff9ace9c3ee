"""`CapturedDraft`: captures whole drafts as CUDA graphs: catching up with the text, a pass per depth, and the tree.

A draft's depth is fixed before capture, from the acceptance of past rounds, because a replayed graph cannot branch on
values. The captured code is the drafter's own, run over buffers with fixed addresses (`models.cuda_graphs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from specdec.models.draft_attention import skips_empty_slots
from specdec.proposers.context import Context
from specdec.proposers.draft_models.drafter import Drafter
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import DynamicTree
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
        tree: the settings of a dynamic tree; None for a chain.
        key: the key of the captured function.
    """

    made: Mapping[str, Tensor]
    depth: int
    tree: DynamicTree | None
    key: object

    def draft(self) -> DraftTree:
        """The draft of these tensors: the inverse of `_as_tensors`."""
        notes = {name.removeprefix("note "): note for name, note in self.made.items() if name.startswith("note ")}
        return DraftTree(
            self.made["tokens"],
            self.made["parents"],
            chain=self.tree is None,
            confidence_bins=self.made.get("confidence_bins"),
            levels=None if self.tree is None else self.depth,
            notes=notes,
        )


class CapturedDraft:
    """The captured drafts of one call.

    A draft is captured if the call has a `Recorder`, the draft is deterministic and no logits processor reads the text.
    """

    def __init__(self) -> None:
        self._ahead: LaunchedDraft | None = None
        self._width = WIDTHS[0]  # current padded width; it only grows, which keeps captures few

    def __call__(self, drafter: Drafter, context: Context) -> DraftTree | None:
        """Return the draft of a round, launched ahead or now; None if it has to be drafted eagerly."""
        depth = self._depth(drafter, context) if self._ahead is None else self._ahead.depth
        newest = drafter.newest(context, WIDTHS[-1]) if depth else None
        if newest is None:
            return None
        missing, states = newest
        launched = self._ahead
        if launched is None:
            launched = self._replayed(drafter, context, depth, self._inputs(drafter, context, depth, missing, states))
        return self._taken(drafter, context, launched, missing)

    def draft_ahead(self, drafter: Drafter, context: Context, new_tokens: NewTokens) -> None:
        """Launch the next draft, see `Proposer.draft_ahead`. For proposers that drop their drafts after a round."""
        depth = self._depth(drafter, context) if new_tokens.tokens.shape[1] <= WIDTHS[-1] else 0
        if depth:
            inputs = self._inputs_ahead(drafter, context, depth, new_tokens)
            self._ahead = self._replayed(drafter, context, depth, inputs)

    def forget(self) -> None:
        """Drop the draft that was launched ahead: it belongs to one round."""
        self._ahead = None

    def _is_elsewhere(self, drafter: Drafter, context: Context) -> bool:
        """Return whether the drafting model is on another device than the text: a graph is of one device."""
        model = drafter.drafting_model()
        weight = None if model is None else next(model.parameters(), None)
        return weight is not None and weight.device != context.tokens.device

    def _depth(self, drafter: Drafter, context: Context) -> int:
        """The depth of the next captured draft, estimated from past rounds; 0: it cannot be captured."""
        recorder, pacer, chain = context.call.recorder, context.pacer, drafter.drafts_chains(context)
        if (
            recorder is None
            or recorder.refused
            or self._is_elsewhere(drafter, context)
            or drafter.draws_from_q(context)
            or not context.call.processors.read_scores_alone
            or not (chain or drafter.tree)
        ):
            return 0
        limit = drafter.deepest(pacer) if chain else min(drafter.deepest(pacer), drafter.tree.depth)
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
        """The tensor inputs of `_made`, by name, for a draft after the `missing` tokens of each row."""
        after_it = min(depth + 1, WIDTHS[-1])  # so many new tokens may follow: they need no other capture
        width, noise, drawn = self._wide_enough(max(*missing, after_it)), context.call.noise, None
        budget = [budget + count for budget, count in zip(context.drafting_budget, missing, strict=True)]
        numbers = [_begins(drafter, context), budget, [width - count for count in missing]]
        begins, device_budget, pads = uploaded(numbers, context.tokens.device)
        if states is not None:
            states = nn.functional.pad(states, (0, 0, width - states.shape[1], 0))  # or cut on the left
        if noise is not None:
            drawn = noise.ahead([end - context.call.start for end in context.ends], depth)
        return _named(NewTokens(context.last_tokens(width), pads, states), begins, device_budget, drawn)

    def _inputs_ahead(self, drafter: Drafter, context: Context, depth: int, new_tokens: NewTokens) -> dict[str, Tensor]:
        """The same for a draft after this round's new tokens, whose number only the device knows."""
        width, noise, drawn = self._wide_enough(new_tokens.tokens.shape[1]), context.call.noise, None
        new_tokens = new_tokens.padded(width)
        begins, budget = uploaded([_begins(drafter, context), context.drafting_budget], new_tokens.pads.device)
        if noise is not None:
            every = noise.ahead([end - context.call.start + 1 for end in context.ends], width - 1 + depth)
            place = torch.arange(depth, device=every.device) + (width - 1 - new_tokens.pads)[:, None]
            drawn = every.gather(1, place[..., None].expand(-1, -1, every.shape[-1]))
        return _named(new_tokens, begins, budget, drawn)

    def _wide_enough(self, most: int) -> int:
        """The padded width for `most` new tokens per row."""
        self._width = min(size for size in WIDTHS if size >= max(most, self._width))
        return self._width

    def _replayed(self, drafter: Drafter, context: Context, depth: int, inputs: Mapping[str, Tensor]) -> LaunchedDraft:
        """Launch a draft with the call's recorder."""
        assert context.call.recorder is not None
        tree = _tree(drafter, context)
        more = inputs["tokens"].shape[1] + max(depth * (1 if tree is None else tree.top_k), drafter.widest_pass)
        left = _left(drafter, context) if skips_empty_slots(context.tokens.device) else None
        sizes = drafter.rows.reserve(more, left)
        key = (type(drafter).__name__, context.call.processors.names, tree, depth, sizes)
        still = replace(context, features=None)  # kept as long as the graph, and those of a prompt are large
        function = partial(self._made, drafter, still, depth, tree, key)
        if drafter.rows.cache.filled:
            made = context.call.recorder(drafter.rows.cache.addresses, key, function, inputs)
        else:
            made = function(**inputs)  # the first run allocates the buffers for replays
        return LaunchedDraft(made, depth, tree, key)

    def _taken(self, drafter: Drafter, context: Context, launched: LaunchedDraft, missing: Sequence[int]) -> DraftTree:
        """Return the launched draft for this round. missing: tokens of each row that were processed for it."""
        rows, drafting = drafter.rows, set(context.rows)
        assert context.call.recorder is not None
        rows.replayed(missing, context.call.recorder.pending[launched.key])
        drafter.count_passes(context, launched.depth)
        draft = launched.draft()
        if len(drafting) < len(rows.lengths):
            done = uploaded([b not in drafting for b in range(len(rows.lengths))], draft.parents.device).bool()
            draft = replace(draft, parents=draft.parents.masked_fill(done[:, None], -1))
        if launched.tree is None:
            return draft
        return _first(draft, drafter.tree_size(context, launched.tree, draft.size - 1), context)

    def _made(
        self,
        drafter: Drafter,
        context: Context,
        depth: int,
        tree: DynamicTree | None,
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
            tree: the settings of a dynamic tree; None for a chain.
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
            pacer=FixedDepth(depth, chain=tree is None),
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
            assert context.call.recorder is not None
            context.call.recorder.pending[key] = rows.pending  # a replay does not count them
        return _as_tensors(draft)


def _tree(drafter: Drafter, context: Context) -> DynamicTree | None:
    """The settings of the dynamic tree to draft; None for a chain."""
    return None if drafter.drafts_chains(context) else drafter.tree


def _named(new_tokens: NewTokens, begins: Tensor, budget: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
    """The inputs of `CapturedDraft._made` that there are, by name."""
    inputs = {"tokens": new_tokens.tokens, "begins": begins, "budget": budget, "pads": new_tokens.pads}
    more = {"states": new_tokens.states, "noise": noise}
    return inputs | {name: given for name, given in more.items() if given is not None}


def _left(drafter: Drafter, context: Context) -> list[int]:
    """Number of tokens by which each of the drafter's rows may grow until the end of the call."""
    sizes = zip(context.ends, context.pads, context.budget, drafter.rows.lengths, strict=True)
    return [end - pad + budget - length for end, pad, budget, length in sizes]


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


def _first(draft: DraftTree, size: int, context: Context) -> DraftTree:
    """Cut the draft to its `size` most probable nodes after the root, which come first."""
    if size == 0:
        return DraftTree.root_only(context.root)
    notes = {**draft.notes, "steps": draft.notes["steps"][:, : 1 + size]}
    return replace(draft.first(1 + size), notes=notes)
