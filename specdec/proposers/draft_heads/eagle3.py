"""`Eagle3Proposer`: an EAGLE-3 head drafts from the target's own hidden states, a pass for each depth."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.eagle3.runner import HeadRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.proposers.draft_heads.head_proposer import HeadProposer
from specdec.proposers.draft_models.draft_nodes import Stepped
from specdec.sampling.dynamic_tree import DynamicTree


class Eagle3Proposer(HeadProposer):
    """A pass for each depth of the tree, over that depth's nodes; arguments as `HeadProposer`'s."""

    head: Eagle3Head
    runner: HeadRunner

    def _load(self, path: str | Path) -> Eagle3Head:
        return load(path)

    def _check_kind(self) -> None:
        if self.head.config.mask_token_id is not None:
            raise ValueError('this is a P-EAGLE head, which drafts in one pass: pass "dflash:PATH", or BlockProposer')

    def _tree(self, top_k: int) -> DynamicTree:
        return DynamicTree(top_k=top_k)

    def _runner(self, embeddings: BorrowedEmbeddings, sized: bool) -> HeadRunner:
        return HeadRunner(self.head, embeddings, self._fast, sized)

    def _step(self, stepped: Stepped, n: int, parents: Tensor | None, chain: bool) -> Tensor:
        logits = self.runner.grow(stepped.tokens[:, -n:], parents, stepped.depth, stepped.seen, chain)
        return logits.to(stepped.tokens.device)
