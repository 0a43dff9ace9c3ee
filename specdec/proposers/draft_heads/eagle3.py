"""`Eagle3Proposer`: an EAGLE-3 head drafts from the target's hidden states, with one pass per depth."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.eagle3.runner import HeadRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.proposers.draft_heads.head_proposer import HeadProposer
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from specdec.sampling.dynamic_tree import DynamicTree


class Eagle3Proposer(HeadProposer):
    """Drafts with an EAGLE-3 head (arXiv 2503.01840), one pass for each depth of the tree.

    EAGLE-1 and EAGLE-2 heads work as well. Drafts are dynamic trees by default, as large as pays, and chains if the
    target cannot verify trees.

    Args:
        head: the head, or a folder or hub id to load it from.
        branching: the number of children per node at each depth of a fixed tree, see `AutoregressiveProposer`.
        tree: the settings of a dynamic tree. `branching=(1,) * n` drafts chains.
        draw: True to draw drafts from q where the rule allows it, see `AutoregressiveProposer`.

    Raises:
        ValueError: the head is of another kind; for a target, if it does not fit.

    Example:
        ```python
        spec = SpeculativeGenerator(model, Eagle3Proposer("path/to/head", tree=DynamicTree(depth=6)))
        output = spec.generate(input_ids, max_new_tokens=128)
        ```
    """

    head: Eagle3Head
    runner: HeadRunner

    def _load(self, path: str | Path) -> Eagle3Head:
        return load(path)

    def _check_kind(self) -> None:
        if self.head.config.mask_token_id is not None:
            raise ValueError(
                'Eagle3Proposer got a P-EAGLE head, which drafts in one pass: pass "dflash:PATH", or BlockProposer'
            )

    def _tree(self, top_k: int) -> DynamicTree:
        return DynamicTree(top_k=top_k)

    def _runner(self, embeddings: BorrowedEmbeddings, sized: bool) -> HeadRunner:
        return HeadRunner(self.head, embeddings, self._fast, sized)

    def _step(self, stepped: DraftNodes) -> Tensor:
        return self.runner.grow(stepped.newest, stepped.parents, stepped.depth, stepped.seen, stepped.is_chain)
