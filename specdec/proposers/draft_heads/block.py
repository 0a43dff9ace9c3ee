"""`BlockProposer`: a block-parallel drafter (DFlash and its kin, P-EAGLE, Medusa) drafts all its tokens in one pass.

The pass gives one distribution per position of the block. A chain or a tree is read out of them.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from specdec.heads.dflash.head import DFlashHead
from specdec.heads.dflash.runner import DFlashRunner
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.eagle3.parallel_runner import ParallelRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.hydra.head import HydraHeads
from specdec.heads.loading import load
from specdec.heads.medusa import MedusaHeads, MedusaRunner
from specdec.proposers.context import Context
from specdec.proposers.draft_heads.head_proposer import HeadProposer
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.dynamic_tree import DynamicTree


class BlockProposer(HeadProposer):
    """Drafts a whole block of tokens in one pass of a DFlash, P-EAGLE or Medusa head, or of a kin of DFlash.

    Drafts are dynamic trees of the most probable combinations by default, and chains if the target cannot verify trees.
    DSpark, Domino and DFlash 2 correct each token's distribution for the tokens before. With a confidence head, the
    length of a chain follows the head's confidence. See DFlash (arXiv 2602.06036), JetSpec (arXiv 2606.18394), Domino
    (arXiv 2605.29707) and Medusa (arXiv 2401.10774).

    Args:
        head: the head, or a folder or hub id to load it from.
        branching: the number of children per node at each depth of a fixed tree, see `AutoregressiveProposer`.
        tree: the settings of a dynamic tree. `branching=(1,) * n` drafts chains.
        draw: True to draw drafts from q where the rule allows it, see `AutoregressiveProposer`.

    Raises:
        ValueError: the head is of another kind; for a target, if it does not fit.

    Example:
        ```python
        spec = SpeculativeGenerator(model, BlockProposer("path/to/dflash-head"))
        output = spec.generate(input_ids, max_new_tokens=128)
        ```
    """

    runner: DFlashRunner | ParallelRunner | MedusaRunner

    @property
    def drafted(self) -> int:
        """Number of tokens that one pass drafts."""
        return self.head.config.drafted

    def _load(self, path: str | Path) -> DFlashHead | Eagle3Head | MedusaHeads | HydraHeads:
        return load(path)

    def _check_kind(self) -> None:
        if isinstance(self.head, Eagle3Head) and self.head.config.mask_token_id is None:
            raise ValueError(
                'BlockProposer got an EAGLE head, which drafts token by token: pass "eagle3:PATH", or Eagle3Proposer'
            )
        if isinstance(self.head, HydraHeads):
            raise ValueError(
                'BlockProposer got Hydra\'s heads, which read drafted tokens: pass "hydra:PATH", or HydraProposer'
            )

    def _tree(self, top_k: int) -> DynamicTree:
        return DynamicTree(depth=self.drafted, top_k=DynamicTree().top_k)  # more depth costs no further pass

    def _runner(self, embeddings: BorrowedEmbeddings, sized: bool) -> DFlashRunner | ParallelRunner | MedusaRunner:
        if isinstance(self.head, DFlashHead):
            return DFlashRunner(self.head, embeddings, self._fast, sized)
        if isinstance(self.head, MedusaHeads):
            return MedusaRunner(self.head, self._fast)
        assert isinstance(self.head, Eagle3Head)
        return ParallelRunner(self.head, embeddings, self._fast, sized)

    def begin(self, context: Context) -> None:
        super().begin(context)
        if not context.pacer.estimates.draft.reads_out:
            context.pacer.observe_read_out(0.0)  # assumed until it is measured

    def _backlog(self, context: Context) -> int:
        return 0 if isinstance(self.head, MedusaHeads) else super()._backlog(context)

    def deepest(self, pacer: Pacer) -> int:
        return min(super().deepest(pacer), self.drafted)

    def _step(self, stepped: DraftNodes) -> Tensor:
        return self.runner.logits_after(stepped.levels, stepped.newest, stepped.parents)

    @property
    def widest_pass(self) -> int:
        return self.head.config.block_size

    def count_passes(self, context: Context, depth: int) -> None:
        super().count_passes(context, 1)
        for _ in range(depth - 1):
            context.pacer.observe_read_out(0.0)

    def _book_step(self, context: Context, logits: Tensor, seconds: float, building: float) -> None:
        """Record the reading of one more token out of the block, which needs no pass."""
        context.pacer.observe_read_out(seconds + building if context.host_sync_is_free else 0.0)

    def _children(self, context: Context, logits: Tensor, stepped: DraftNodes, k: int) -> tuple[Tensor, Tensor]:
        """See `HeadProposer`. Without a correction, all nodes of a depth have the same children."""
        n = logits.shape[1]
        if n == 1 or self.runner.block.correction is not None or not context.call.processors.read_scores_alone:
            return super()._children(context, logits, stepped, k)
        tokens, log_probs = super()._children(context, logits[:, :1], stepped, k)
        return tokens.expand(-1, n, -1), log_probs.expand(-1, n, -1)

    def _confidence(self, scores: Tensor, q: Tensor | None) -> Tensor:
        acceptance = self.runner.block.acceptance
        return super()._confidence(scores, q) if acceptance is None else acceptance[:, -1].to(scores.device)
