"""`FeatureProposer`: base class of proposers that draft from the target's hidden states.

It collects the states of accepted tokens that the head or MTP layers have not processed yet.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.models.cache.ragged_rows import CachedRows
from specdec.proposers.context import Context
from specdec.proposers.draft_models.autoregressive import AutoregressiveProposer
from specdec.proposers.draft_models.cuda_graph_drafts import WIDTHS
from specdec.proposers.draft_state import DraftState
from specdec.proposers.pacing.draft_passes import FEW_TOKENS
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import NewTokens, RoundResult
from specdec.utils.timing import clock

MOST_WAITING = 2048  # states of a row to keep after a call: each takes three hidden states or more


class Follower(Protocol):
    """Interface of runners of a head or of MTP layers with a cache of their own, such as `HeadRunner`."""

    def extend(self, tokens: Tensor, states: Tensor, pads: Sequence[int]) -> Tensor:
        """Append known tokens and drop the draft.

        Args:
            tokens: (B, W) int64, row b left-padded by pads[b].
            states: (B, W, C), the target's states at the token before each of them.
            pads: B ints.

        Returns:
            Logits (B, 1, K) after each row's last token.
        """

    def drop_draft(self) -> None:
        """Remove the draft's nodes from the cache."""


class CapturableRunner(Follower, Protocol):
    """A runner whose drafts can be captured as CUDA graphs."""

    @property
    def rows(self) -> CachedRows:
        """The cached rows with the runner's keys and values."""

    def extend_after(self, tokens: Tensor, states: Tensor, pads: Tensor) -> Tensor:
        """Like `extend`, for a few tokens after the rows' `device_lengths`. pads: (B, 1) int64."""


class FeatureProposer(AutoregressiveProposer):
    """Drafts from the target's hidden states.

    Nodes computed from drafted features are dropped after each round. Accepted tokens are processed again with the
    target's states. A subclass creates its runner in `begin`.
    """

    @property
    @abstractmethod
    def follower(self) -> Follower:
        """The runner of the head or MTP layers."""

    def begin(self, context: Context) -> None:
        super().begin(context)
        # per row, the target's states that are still to be processed, (n, C) each
        self._waiting: list[list[Tensor]] = [[] for _ in range(context.batch_size)]
        self._after_end: dict[int, Tensor] = {}  # by row that finished before others, the states of its last round
        self._lost: set[int] = set()  # rows of which the head may have wrong entries, which no draft will need

    def resume_from(self, state: DraftState) -> None:
        state.put_into(self.rows)
        self._waiting = [[part] if len(part) else [] for part in state.waiting]

    def draft_state(self, context: Context) -> DraftState | None:
        if self.recordable is None or context.features is None:
            return None
        waiting = []
        for b, (parts, count) in enumerate(zip(self._waiting, context.fresh, strict=True)):
            last = self._after_end.get(b, context.features[b, context.features.shape[1] - count :])
            whole = torch.cat([*parts, last])
            waiting.append(whole if len(whole) <= MOST_WAITING else whole[:0].clone())
        state = DraftState.of(self.rows, waiting)
        known = state.known
        return state.up_to(known, [0 if b in self._lost else count for b, count in enumerate(known)])

    def _lend(self, context: Context) -> None:
        if self.recordable is not None:
            super()._lend(context)

    def propose(self, context: Context) -> DraftTree:
        self._keep_states(context)
        if context.call.recorder is not None and context.rows:  # a captured draft overwrites entries of other rows
            self._lost.update({*range(context.batch_size)} - {*context.rows})
        if not any(self._waiting):  # rows that waited for others have no new tokens to draft after
            return DraftTree.root_only(context.root)
        return super().propose(context)

    def sync(self, context: Context) -> None:
        self._captured.forget()
        self._keep_states(context)

    def _keep_states(self, context: Context) -> None:
        assert context.features is not None
        for b, count in enumerate(context.fresh):
            if count and context.pacer.limit:
                states = context.features[b, context.features.shape[1] - count :]
                if context.active[b]:
                    self._waiting[b].append(states)
                elif b not in self._after_end:  # later states are of padding
                    self._after_end[b] = states.clone()
                    if self._waiting[b]:  # they will be read with padding's tokens
                        self._lost.add(b)

    def observe(self, draft: DraftTree, result: RoundResult, accepted: Sequence[int]) -> None:
        super().observe(draft, result, accepted)
        self.follower.drop_draft()

    def _backlog(self, context: Context) -> int:
        width = max(sum(map(len, parts)) for parts in self._waiting)
        return width * context.batch_size if width > FEW_TOKENS else 0

    # Drafts captured as CUDA graphs

    @property
    def recordable(self) -> CapturableRunner | None:
        """The runner, if its drafts can be captured."""
        return None

    @property
    def rows(self) -> CachedRows:
        assert self.recordable is not None
        return self.recordable.rows

    def newest(self, context: Context, most: int) -> tuple[Sequence[int], Tensor | None] | None:
        """See `Drafter`. The new tokens of the last round, if no others are waiting."""
        missing = [sum(map(len, parts)) for parts in self._waiting]
        last = all(
            len(parts) < 2 and count in (0, fresh)
            for parts, count, fresh in zip(self._waiting, missing, context.fresh, strict=True)
        )
        # Only the last token is known of a prompt given as embeddings.
        known = all(count <= length for count, length in zip(missing, context.lengths, strict=True))
        if self.recordable is None or not last or not known or not max(missing):
            return None
        features = context.features
        assert features is not None
        if max(missing) > most:  # prompts, of which a captured draft processes the end
            if min(missing) <= WIDTHS[0]:
                return None
            self._read(context, missing, features, max(missing) - WIDTHS[0])
            features, missing = features[:, -WIDTHS[0] :], [WIDTHS[0]] * len(missing)
        self._waiting = [[] for _ in missing]
        return missing, features

    def read_after(self, tokens: Tensor, states: Tensor | None, pads: Tensor) -> Tensor:
        assert self.recordable is not None
        assert states is not None
        return self.recordable.extend_after(tokens, states, pads).to(tokens.device)

    def draft_ahead(self, context: Context, new_tokens: NewTokens) -> None:
        if self.recordable is not None and not any(self._waiting):
            self._captured.draft_ahead(self, context, new_tokens)

    # Eager drafts

    def _catch_up(self, context: Context) -> Tensor:
        assert context.features is not None
        states = []
        for b, (parts, known) in enumerate(zip(self._waiting, context.lengths, strict=True)):
            waiting = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else context.features[b, :0]
            states.append(waiting[max(0, len(waiting) - known) :])
        missing = [len(part) for part in states]
        if all(len(parts) < 2 for parts in self._waiting) and missing == list(context.fresh):
            padded = context.features  # without a copy, since long prompts have large states
        else:
            padded = pad_sequence(states, batch_first=True, padding_side="left")
        self._waiting = [[] for _ in missing]
        return self._read(context, missing, padded, max(missing))

    def _read(self, context: Context, missing: Sequence[int], states: Tensor, count: int) -> Tensor:
        """Process the first `count` columns of the `missing` tokens with their states (B, W, C); logits (B, 1, K)."""
        start, width = clock(), max(missing)
        tokens, states = context.last_tokens(width)[:, :count], states[:, -width:][:, :count]
        logits = self.follower.extend(tokens, states, [width - m for m in missing])
        self._book_pass(context, logits, clock() - start, tokens.numel() if count > FEW_TOKENS else 1)
        return logits.to(context.tokens.device)
