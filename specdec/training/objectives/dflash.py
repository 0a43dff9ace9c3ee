"""`BlockObjective`: what a drafter of blocks is trained to do: DFlash's (2602.06036) and DSpark's objectives.

In each row of texts some tokens are anchors, others in every update. Behind each a block is drafted, and a place's loss
counts the less the further it is from the anchor. DSpark's confidence head learns the chance that the target accepts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.heads.dflash.head import DFlashHead
from specdec.training.objectives.block_unroll import reading_weight, unroll_blocks
from specdec.training.objectives.eagle3 import Drafted, Objective

DECAY = math.exp(-1 / 4)  # DeepSpec's, for blocks of 7; DFlash's for blocks of 8
MIX = 1_000_003


class BlockObjective(Objective):
    """Arguments as `Objective`'s.

    Args:
        anchors: in a row of texts, at most.
    """

    head: DFlashHead

    def __init__(self, *args: Any, decay: float = DECAY, anchors: int = 64, **kwargs: Any):
        super().__init__(*args, decay=decay, **kwargs)
        self.anchors = anchors

    def drafts(self, ids: Tensor, learn: Tensor, documents: Tensor) -> Tensor:
        learn, T = learn.bool(), ids.shape[1]
        found = learn.new_zeros(self.steps, *learn.shape)
        alive = self._chosen(ids, learn, documents)
        for step, first in enumerate(range(2, min(self.steps + 2, T))):
            alive = alive[:, : T - first] & learn[:, first:] & (documents[:, first:] == documents[:, : T - first])
            found[step, :, first:] = alive
        return found

    def _chosen(self, ids: Tensor, learn: Tensor, documents: Tensor) -> Tensor:
        """(B, T) bool, the anchors of this update."""
        drafts = pad(learn[:, 1:-1] & learn[:, 2:] & (documents[:, 2:] == documents[:, :-2]), (0, 2))  # (B, T)
        return _some(drafts, self.anchors, ids.sum(-1) * MIX + self.update)

    def _unrolled(self, ids: Tensor, learn: Tensor, documents: Tensor, taps: Tensor, steps: int) -> Iterator[Drafted]:
        T, chosen = ids.shape[1], self._chosen(ids, learn, documents)
        places = unroll_blocks(self.head, ids, self._embed, taps, steps, documents, wanted=chosen)
        for first, place in enumerate(places, start=2):
            yield Drafted(place.read[:, : T - first], None if place.sure is None else place.sure[:, : T - first])

    def _weight(self) -> Tensor:
        return reading_weight(self.head)


def _some(allowed: Tensor, most: int, seeds: Tensor) -> Tensor:
    """(B, T) bool, at most so many of a row's allowed ones (B, T), drawn with the row's own seed (B,): whoever has that
    row, and however often training was stopped before.
    """
    chosen = torch.zeros_like(allowed)
    for row, seed in enumerate(seeds.tolist()):
        found = allowed[row].nonzero()[:, 0]
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))[:most]
        chosen[row, found[order.to(found.device)]] = True
    return chosen
