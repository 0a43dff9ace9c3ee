"""`DFlashRunner`: runs a DFlash drafter, or one of its kin, next to a target, over the rows of a batch.

Slot i of a row in its cache holds the keys and values of the target's state at token i, at position i. The slots after
them hold the drafted block, which the next `extend` overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.heads.base import parts_of
from specdec.heads.block import Block, BlockDrafts
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.embeddings import BorrowedEmbeddings, apply_lm_head
from specdec.models.cache.buffers import Span
from specdec.models.cache.ragged_rows import CachedRows, VisibleSlots
from specdec.models.linear import with_fast_linears


class DFlashRunner(BlockDrafts, CachedRows):
    """Runs one drafter. Arguments as for `HeadRunner`."""

    def __init__(
        self, head: DFlashHead, embeddings: BorrowedEmbeddings, fast: DFlashHead | None = None, sized: bool = False
    ):
        c, self.sized = head.config, sized
        # A layer with a window keeps the slots that the block's last token sees, and the block.
        super().__init__([Span(None if window is None else window + 2 * c.block_size) for window in c.windows])
        self.head = head
        self._fast = with_fast_linears(head if fast is None else fast)
        head.move_frequencies()
        self.embeddings = embeddings
        self.lm_head = None if embeddings.lm_head is None else with_fast_linears(embeddings.lm_head)

    @torch.no_grad()
    def extend(self, tokens: Tensor, states: Tensor, pads: Sequence[int]) -> Tensor:
        """Append the target's states, and draft a block after each row's last token, whose state is not known yet.

        See `Follower.extend`.
        """
        head, W = self.head, tokens.shape[1]
        self.drop_draft()
        for part, part_pads in parts_of(W, W, pads):
            width = part.stop - part.start
            visible_slots = self.place_known(width, part_pads, head.device)
            self._fast.append_kv(states[:, part].to(head.device, head.dtype), visible_slots.positions, self.cache)
            self.commit([width - pad for pad in part_pads])
        self.block = self._pass(tokens[:, -1:])
        return self.logits_after(0, tokens[:, -1:], None)

    @torch.no_grad()
    def extend_after(self, tokens: Tensor, states: Tensor, pads: Tensor) -> Tensor:
        """`extend` by few tokens, with row lengths read from `device_lengths`. pads: (B, 1) int64."""
        self.drop_draft()
        visible_slots = self.place_after(tokens.shape[1], pads)
        self._fast.append_kv(states.to(self.head.device, self.head.dtype), visible_slots.positions, self.cache)
        self.block = self._pass(tokens[:, -1:])
        return self.logits_after(0, tokens[:, -1:], None)

    def _pass(self, anchor: Tensor) -> Block:
        """Run the drafter over the anchors (B, 1) and the masks after them."""
        c, B = self.head.config, len(anchor)
        assert c.mask_token_id is not None
        masks = anchor.new_full((B, c.block_size - 1), c.mask_token_id)
        embeds = self._embedded(torch.cat([anchor, masks], 1))
        place = torch.arange(c.block_size, device=self.head.device)
        whole = torch.ones(B, c.block_size, c.block_size, dtype=torch.bool, device=self.head.device)
        visible_slots = self.place_draft(place.expand(B, -1), whole)
        h = self._fast(embeds, visible_slots.positions, self._visible(visible_slots, place, B), self.cache)
        drafting = h[:, c.block_size - c.drafted :]
        correction, confidence = self._fast.correction, self._fast.confidence_head
        block = Block(self._logits(drafting), drafting, correction, confidence, self._embedded)
        if c.from_anchor or correction is None:
            return block
        before = correction.embedded(anchor.to(h.device), self._embedded).to(h.dtype)
        return replace(block, initial_state=correction.initial_state(before, h[:, :1]))

    def _embedded(self, tokens: Tensor) -> Tensor:
        # An embedding that norms is read without its norm, as transformers does (5.23, candidate_generator.py).
        embeds, scale = self.embeddings.embedded(tokens, self.head, normed=False), self.head.config.embedding_scale
        return embeds if scale == 1.0 else embeds * scale

    def _visible(self, visible_slots: VisibleSlots, place: Tensor, rows: int) -> list[Tensor]:
        """Return (B, n, slots) bool for each layer: known tokens and the block, within the layer's window."""
        c, masks = self.head.config, {}
        for window, span in dict(zip(c.windows, self.spans, strict=True)).items():
            held = self.cache.held(span, self.head.device)[:, None]  # (B or 1, 1, slots)
            node = held - visible_slots.base[..., None]  # index in the block, negative for known tokens
            seen = node < c.block_size
            if window is not None:
                first = visible_slots.base[..., None] if c.window_from_anchor else visible_slots.positions[..., None]
                seen = seen & (held >= first - window)
            if c.is_causal(window):
                seen = seen & (node <= place[:, None])
            masks[window] = seen.expand(rows, c.block_size, -1)
        return [masks[window] for window in c.windows]

    def _logits(self, h: Tensor) -> Tensor:
        c = self.head.config
        if self.lm_head is None:
            assert self._fast.lm_head is not None
            logits = self._fast.lm_head(h)
        else:
            logits = apply_lm_head(self.lm_head, h)
        logits = logits if c.logit_scale == 1.0 else logits * c.logit_scale
        return logits if c.logit_softcap is None else torch.tanh(logits / c.logit_softcap) * c.logit_softcap
