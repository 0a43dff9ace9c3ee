"""`HydraProposer`: Hydra's heads draft a token each, from the target's last state and the tokens drafted before."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.hydra.checkpoint import read
from specdec.heads.hydra.head import HydraHeads
from specdec.heads.hydra.runner import HydraRunner
from specdec.proposers.draft_heads.head_proposer import HeadProposer
from specdec.proposers.draft_models.draft_nodes import Stepped
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.dynamic_tree import DynamicTree


class HydraProposer(HeadProposer):
    """A head for each depth of the tree, over that depth's nodes; arguments as `HeadProposer`'s."""

    head: HydraHeads
    runner: HydraRunner

    def _load(self, path: str | Path) -> HydraHeads:
        return read(path).head()

    def _check_kind(self) -> None:
        if not isinstance(self.head, HydraHeads):
            raise ValueError(f"this is a {type(self.head).__name__}: Hydra's heads are of another kind")

    def _tree(self, top_k: int) -> DynamicTree:
        return DynamicTree(depth=self.head.config.drafted, top_k=top_k)

    def _runner(self, embeddings: BorrowedEmbeddings, sized: bool) -> HydraRunner:
        return HydraRunner(self.head, embeddings, self._fast)

    def _deepest(self, pacer: Pacer) -> int:
        return min(super()._deepest(pacer), self.head.config.drafted)

    def _step(self, stepped: Stepped, n: int, parents: Tensor | None, chain: bool) -> Tensor:
        logits = self.runner.behind(stepped.levels, stepped.tokens[:, -n:], parents)
        return logits.to(stepped.tokens.device)
