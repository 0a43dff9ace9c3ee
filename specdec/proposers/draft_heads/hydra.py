"""`HydraProposer`: Hydra's heads draft one token each, from the target's last state and the tokens drafted before."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.hydra.checkpoint import read
from specdec.heads.hydra.head import HydraHeads
from specdec.heads.hydra.runner import HydraRunner
from specdec.proposers.draft_heads.head_proposer import HeadProposer
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.dynamic_tree import DynamicTree


class HydraProposer(HeadProposer):
    """Drafts with Hydra's heads (arXiv 2402.05109), one head for each depth of the tree.

    Each head reads the target's last hidden state and the tokens drafted before its own. Drafts are dynamic trees by
    default, and chains if the target cannot verify trees.

    Args:
        head: the heads, or a folder or hub id to load them from.
        branching: the number of children per node at each depth of a fixed tree, see `AutoregressiveProposer`.
        tree: the settings of a dynamic tree. `branching=(1,) * n` drafts chains.
        draw: True to draw drafts from q where the rule allows it, see `AutoregressiveProposer`.

    Raises:
        ValueError: the heads are of another kind; for a target, if they do not fit.

    Example:
        ```python
        spec = SpeculativeGenerator(model, HydraProposer("path/to/hydra-heads"))
        output = spec.generate(input_ids, max_new_tokens=128)
        ```
    """

    head: HydraHeads
    runner: HydraRunner

    def _load(self, path: str | Path) -> HydraHeads:
        return read(path).head()

    def _check_kind(self) -> None:
        if not isinstance(self.head, HydraHeads):
            raise ValueError(
                f"HydraProposer needs Hydra's heads, got {type(self.head).__name__}: use BlockProposer or "
                "Eagle3Proposer"
            )

    def _tree(self, top_k: int) -> DynamicTree:
        return DynamicTree(depth=self.head.config.drafted, top_k=top_k)

    def _runner(self, embeddings: BorrowedEmbeddings, sized: bool) -> HydraRunner:
        return HydraRunner(self.head, embeddings, self._fast)

    def deepest(self, pacer: Pacer) -> int:
        return min(super().deepest(pacer), self.head.config.drafted)

    def _step(self, stepped: DraftNodes) -> Tensor:
        return self.runner.logits_after(stepped.levels, stepped.newest, stepped.parents)
