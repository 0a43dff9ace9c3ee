"""`ParallelRunner`: runs a P-EAGLE head, an EAGLE-3 head that drafts several tokens in a pass, beside a target.

Where an EAGLE-3 head is fed its own output and a drafted token, this one is fed what it learnt to take for both:
`mask_hidden` and the mask token. All its tokens so come from the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.heads.block import Block
from specdec.heads.eagle3.runner import HeadRunner


class ParallelRunner(HeadRunner):
    """An EAGLE-3 head's runner whose drafts are read out of one `block`."""

    block: Block

    @torch.no_grad()
    def extend(self, tokens: Tensor, states: Tensor, pads: Sequence[int]) -> Tensor:
        """See `HeadRunner.extend`. What it drafts behind its first token is in `block` then."""
        return self._drafted(super().extend(tokens, states, pads))

    @torch.no_grad()
    def extend_behind(self, tokens: Tensor, states: Tensor, pads: Tensor) -> Tensor:
        """See `HeadRunner.extend_behind`, and `extend`."""
        return self._drafted(super().extend_behind(tokens, states, pads))

    def _drafted(self, first: Tensor) -> Tensor:
        masks = self.head.config.block_size - 1
        self.block = Block(torch.cat([first, self._masked(len(first), masks)], 1) if masks else first)
        return first

    def behind(self, depth: int, tokens: Tensor, above: Tensor | None) -> Tensor:
        """Logits (B, n, K) behind n tokens (B, n) at this depth of the draft, see `Block.behind`."""
        logits, self.block = self.block.behind(depth, tokens, above)
        return logits

    def _masked(self, rows: int, n: int) -> Tensor:
        """Logits (rows, n, K) of the masks behind each row."""
        head, device = self.head, self.head.device
        assert head.config.mask_token_id is not None
        assert head.mask_hidden is not None
        tokens = torch.full((rows, n), head.config.mask_token_id, device=device)
        features = self._fused(head.mask_hidden).expand(rows, n, -1)
        ancestors = torch.ones(rows, n, n, dtype=torch.bool, device=device).tril()
        visible_slots = self.place_draft(torch.arange(n, device=device).expand(rows, -1), ancestors)
        h = self._pass(tokens, features, visible_slots, sees_all=False)
        return self._logits(h)
