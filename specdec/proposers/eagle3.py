"""`Eagle3Proposer`: an EAGLE-3 head drafts from the target's own hidden states, a pass for each depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from specdec.eagle3.checkpoint import load
from specdec.eagle3.head import Eagle3Head
from specdec.eagle3.runner import HeadRunner, Lent
from specdec.proposers.autoregressive import Stepped
from specdec.proposers.head import HeadProposer
from specdec.tree import DynamicTree


class Eagle3Proposer(HeadProposer):
    """Drafts dynamic trees by default, as large as pays here; chains where the target can verify nothing else.

    On CPUs in bfloat16 the head's weights are read as 8-bit integers: a draft need not be exact, it is verified.

    Args:
        head: the head, or a folder or hub id of any of the known formats (see `specdec inspect`).
        branching: the draft's shape, see `AutoregressiveProposer`.
        tree: likewise.
        draw: how the draft is chosen, see there.
    """

    head: Eagle3Head
    runner: HeadRunner

    def __init__(
        self,
        head: Eagle3Head | str | Path,
        *,
        branching: Sequence[int] | None = None,
        tree: DynamicTree | None = None,
        draw: bool = True,
    ):
        super().__init__(head, branching=branching, tree=tree, draw=draw)
        if self.head.config.mask_token_id is not None:
            raise ValueError('this is a P-EAGLE head, which drafts in one pass: pass "dflash:PATH", or BlockProposer')

    def _load(self, path: str | Path) -> Eagle3Head:
        return load(path)

    def _tree(self, top_k: int) -> DynamicTree:
        return DynamicTree(top_k=top_k)

    def _runner(self, lent: Lent) -> HeadRunner:
        return HeadRunner(self.head, lent, self._fast)

    def _step(self, stepped: Stepped, n: int, parents: Tensor | None, chain: bool) -> Tensor:
        logits = self.runner.grow(stepped.tokens[:, -n:], parents, stepped.depth, stepped.seen, chain)
        return logits.to(stepped.tokens.device)
