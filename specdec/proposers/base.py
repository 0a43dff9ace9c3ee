"""`Proposer`, the base class of everything that drafts.

A proposer has to implement `propose` only; see examples/own_proposer.py.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from specdec.models.hidden_states import Taps
from specdec.proposers.context import Context
from specdec.proposers.draft_check import checked
from specdec.proposers.draft_state import DraftState
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import NewTokens, RoundResult


class Proposer(ABC):
    """Base class of proposers: drafts tokens for the target to verify.

    The output does not depend on the proposer, as long as each draft states how it was made. A draft is either chosen
    deterministically (`DraftTree.probs` is None), or drawn from a distribution q, given as `DraftTree.probs`. Whether
    a token is drafted may depend on q, never on the token that was drawn.

    Each `generate()` call drafts with a shallow copy of the proposer. Attributes set in `begin` and later belong to
    this call alone. Attributes set in `__init__` are shared between calls, also in other threads.

    Example:
        ```python
        class RepeatProposer(Proposer):
            def propose(self, context: Context) -> DraftTree:
                return context.chain([[token] * 4 for token in context.root.tolist()])

        spec = SpeculativeGenerator(model, RepeatProposer())
        ```
    """

    paces_itself = False  # True if `propose` asks `context.pacer` how far to draft

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "follow" in vars(cls) and "sync" not in vars(cls):
            warnings.warn(
                f"{cls.__name__}.follow: Proposer.follow is now Proposer.sync", DeprecationWarning, stacklevel=2
            )
            cls.sync = cls.follow  # type: ignore[attr-defined, method-assign]

    def taps(self, target: PreTrainedModel) -> Taps | None:
        """The target's hidden states that this proposer reads as `Context.features`. None: it reads none."""
        return None

    def check(self, target: PreTrainedModel) -> None:
        """Check that this proposer can draft for `target`. Called once, when the generator is constructed.

        Raises:
            ValueError: it cannot.
        """

    def begin(self, context: Context) -> None:
        """Prepare for a `generate()` call. Called on the call's own copy; `context` holds the prompts."""

    def resume_from(self, state: DraftState) -> None:
        """Continue from what an earlier call has read of the rows. Called after `begin`.

        Args:
            state: a state of `draft_state`, cut to the tokens in the target's cache.
        """

    def draft_state(self, context: Context) -> DraftState | None:
        """Return what was read of the rows, for a later call that continues from their cache. Called after `end`.

        Args:
            context: the final state of the batch.

        Returns:
            The state, which nothing changes any more. None: there is none.
        """
        return None

    def drafting_model(self) -> nn.Module | None:
        """The model whose passes make the drafts, if there is one. Called after `check`.

        Costs measured by earlier processes are looked up by the shape of this model.
        """
        return None

    def capture(self, compiled: bool) -> None:
        """Allow passes to be captured as CUDA graphs from now on. Called after `check`.

        Args:
            compiled: True to run captured passes through `torch.compile`, see `StaticForward`.
        """

    @property
    def drafted_by(self) -> str:
        """Name of the proposer that made the last draft, for the report."""
        return type(self).__name__

    @abstractmethod
    def propose(self, context: Context) -> DraftTree:
        """Draft continuations of the rows.

        Args:
            context: the state of the batch.

        Returns:
            One tree per row. `DraftTree.root_only(context.root)` drafts nothing.
        """

    def paced_draft(self, context: Context) -> DraftTree:
        """Return the draft of `propose`, limited in depth if the proposer leaves that to its caller.

        Without a fixed `draft_length`, tokens of a chain are cut that are not expected to pay, by how often past
        drafts were accepted at their depth.
        """
        pacer = context.pacer
        if self.paces_itself:
            return self.propose(context)
        if pacer.length == 0:
            return DraftTree.root_only(context.root)
        draft = checked(self.propose(context), context, f"{self.drafted_by}.propose", values=False)
        if draft.size == 1:
            return draft
        if pacer.length is not None:
            return draft.up_to_depth(pacer.length)
        if not draft.chain or draft.confidence_bins is not None:  # trees are verified as they are
            return draft
        rows = max(1, len(context.rows))
        gains, chance = [], float(rows)
        for depth in range(1, draft.size):
            chance *= pacer.acceptance.rate(depth, like=pacer.expected_rate)
            gains.append(chance)
        draft = draft.up_to_depth(pacer.best_length(gains, rows))
        return draft if draft.size == 1 else replace(draft, confidence_bins=draft.depth)

    def sync(self, context: Context) -> None:
        """Keep up with a round in which another proposer drafts (see `HybridProposer`), and drop a draft made ahead.

        Store `context.fresh` and `context.features` if they are needed: the next context holds only later ones. The
        text stays available. `observe` is not called for such a round.
        """

    def draft_ahead(self, context: Context, new_tokens: NewTokens) -> None:
        """Called while the device verifies this round's draft.

        A proposer whose next draft depends on device tensors only may launch it now; the next `propose` returns it.

        Args:
            context: the state of the batch in this round.
            new_tokens: the tokens that each row gets in this round, on the device.
        """

    def observe(self, draft: DraftTree, result: RoundResult, accepted: Sequence[int]) -> None:
        """Process the result of a round in which this proposer drafted.

        Args:
            draft: the draft that was verified. On a CUDA device its tensors may hold the next draft already if it was
                captured; node 0 is what the proposer put there.
            result: the result. `result.host()` gives it on the host, with the draft's notes, without a host sync.
                `result.host().tokens[b]` are the tokens that the text of row b got in this round; none follows its end.
                A row that is ahead of the others may still be cut back later, see `end`.
            accepted: B ints, the number of drafted tokens that were accepted in each row.
        """

    def end(self, context: Context) -> None:
        """Finish a `generate()` call that ran to its end. Called once, after the last `observe`.

        A proposer with a memory stores the texts here. The default does nothing.

        Args:
            context: the final state of the batch: `context.row(b)` is the whole text of row b.
        """
