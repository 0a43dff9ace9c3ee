"""`ParallelRunner`: runs a P-EAGLE head, an EAGLE-3 head that drafts several tokens per pass, next to a target.

An EAGLE-3 head reads its own output and the drafted token to draft the next one. A P-EAGLE head reads the learned
`mask_hidden` and the mask token instead, so all its tokens depend on the known text only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.heads.block import Block, BlockDrafts
from specdec.heads.eagle3.runner import HeadRunner


class ParallelRunner(BlockDrafts, HeadRunner):
    """Runs a P-EAGLE head."""

    @torch.no_grad()
    def extend(self, tokens: Tensor, states: Tensor, pads: Sequence[int]) -> Tensor:
        """See `HeadRunner.extend`. Also drafts a new `block`."""
        return self._drafted(super().extend(tokens, states, pads))

    @torch.no_grad()
    def extend_after(self, tokens: Tensor, states: Tensor, pads: Tensor) -> Tensor:
        """See `HeadRunner.extend_after`, and `extend`."""
        return self._drafted(super().extend_after(tokens, states, pads))

    def _drafted(self, first: Tensor) -> Tensor:
        masks = self.head.config.block_size - 1
        self.block = Block(torch.cat([first, self._masked(len(first), masks)], 1) if masks else first)
        return first

    def _masked(self, rows: int, n: int) -> Tensor:
        """Return logits (rows, n, K) of n masks after each row."""
        head, device = self.head, self.head.device
        assert head.config.mask_token_id is not None
        assert head.mask_hidden is not None
        tokens = torch.full((rows, n), head.config.mask_token_id, device=device)
        features = self._fused(head.mask_hidden).expand(rows, n, -1)
        visible_slots = self.place_draft(torch.arange(n, device=device).expand(rows, -1))
        h = self._pass(tokens, features, visible_slots, sees_all=False)
        return self._logits(h)
