"""Training objective of block drafters: DFlash's (2602.06036) and DSpark's.

In every update some tokens of each row are chosen at random as anchors. A block is drafted after each anchor, and the
loss of a position decays with its distance from the anchor. DSpark's confidence head is trained on the probability that
the target accepts the draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.heads.dflash.head import DFlashHead
from specdec.training.objectives.block_unroll import lm_head_weight, unroll_blocks
from specdec.training.objectives.eagle3 import Objective
from specdec.training.objectives.unroll import Drafted

DECAY = math.exp(-1 / 4)  # from DeepSpec for blocks of 7, from DFlash for blocks of 8
MIX = 1_000_003


class BlockObjective(Objective):
    """Objective of a block drafter. Takes the arguments of `Objective`, and:

    Args:
        anchors: maximum number of anchors per row of texts.
    """

    head: DFlashHead

    def __init__(self, *args: Any, decay: float = DECAY, anchors: int = 64, **kwargs: Any):
        super().__init__(*args, decay=decay, **kwargs)
        self.anchors = anchors

    def drafts(self, ids: Tensor, learn: Tensor, documents: Tensor) -> Tensor:
        learn, T = learn.bool(), ids.shape[1]
        found = learn.new_zeros(self.steps, *learn.shape)
        alive = self._anchors(ids, learn, documents)
        for step, first in enumerate(range(2, min(self.steps + 2, T))):
            alive = alive[:, : T - first] & learn[:, first:] & (documents[:, first:] == documents[:, : T - first])
            found[step, :, first:] = alive
        return found

    def _anchors(self, ids: Tensor, learn: Tensor, documents: Tensor) -> Tensor:
        """Choose the anchors of this update at random, (B, T) bool. The seed does not depend on a row's process."""
        drafts = pad(learn[:, 1:-1] & learn[:, 2:] & (documents[:, 2:] == documents[:, :-2]), (0, 2))  # (B, T)
        chosen = torch.zeros_like(drafts)
        for row, seed in enumerate((ids.sum(-1) * MIX + self.update).tolist()):
            found = drafts[row].nonzero()[:, 0]
            order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))[: self.anchors]
            chosen[row, found[order.to(found.device)]] = True
        return chosen

    def _unrolled(self, ids: Tensor, learn: Tensor, documents: Tensor, taps: Tensor, steps: int) -> Iterator[Drafted]:
        chosen = self._anchors(ids, learn, documents)
        return unroll_blocks(self.head, ids, self._embed, taps, steps, documents, wanted=chosen)

    def _weight(self) -> Tensor:
        return lm_head_weight(self.head)
