"""`Drafter`: base class of proposers whose drafts can be captured as CUDA graphs (`cuda_graph_drafts`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from specdec.models.cache.ragged_rows import CachedRows
from specdec.proposers.base import Proposer
from specdec.proposers.context import Context
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import DynamicTree


class Drafter(Proposer):
    """A proposer as a captured draft calls it. The defaults are those of a drafter that cannot be captured.

    Attributes:
        tree: the settings of a dynamic tree; None for other drafts.
    """

    tree: DynamicTree | None
    paces_itself = True

    @property
    def rows(self) -> CachedRows:
        """The cached rows of the drafting model or head."""
        raise NotImplementedError

    @property
    def widest_pass(self) -> int:
        """Cache slots that one pass writes after the text, if more than the draft's nodes: a block's size."""
        return 0

    def newest(self, context: Context, most: int) -> tuple[Sequence[int], Tensor | None] | None:
        """Take each row's number of unprocessed tokens, and the target's states (B, W, C) for them, left-padded.

        They count as processed afterwards. None if there are more than `most`, or if the draft cannot be captured.
        """
        return None

    def read_after(self, tokens: Tensor, states: Tensor | None, pads: Tensor) -> Tensor:
        """Process tokens (B, W) after the rows, whose lengths are `device_lengths`; logits (B, 1, K) after them.

        Args:
            tokens: (B, W) int64, row b left-padded by pads[b].
            states: (B, W, C), the target's states for the tokens; None for a draft model.
            pads: (B, 1) int64.
        """
        raise NotImplementedError

    @abstractmethod
    def grow_draft(self, context: Context, logits: Tensor, limit: int) -> DraftTree:
        """Grow the draft from the logits (B, 1, K) after the roots, down to depth `limit`."""

    @abstractmethod
    def drafts_chains(self, context: Context) -> bool:
        """Return whether to draft chains."""

    @abstractmethod
    def draws_from_q(self, context: Context) -> bool:
        """Return whether tokens are drawn, which is not captured."""

    @abstractmethod
    def tree_size(self, context: Context, tree: DynamicTree, count: int) -> int:
        """The number of candidates to verify, out of `count`."""

    def deepest(self, pacer: Pacer) -> int:
        """The largest depth of a draft."""
        return pacer.limit

    def count_passes(self, context: Context, depth: int) -> None:
        """Report the passes of a captured draft to the pacer."""
        for _ in range(depth):
            context.pacer.launched_draft_pass()
