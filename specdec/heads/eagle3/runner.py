"""`HeadRunner`: runs an EAGLE-3 head next to a target, over the rows of a batch.

Slot i of a row in its cache pairs the target's state at token i with token i+1, at position i. Entries computed from
drafted features are discarded after every round. The accepted tokens are appended again with the target's own states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.heads.base import parts_of, prefill_width
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.embeddings import BorrowedEmbeddings, apply_lm_head
from specdec.models.cache.buffers import Span
from specdec.models.cache.ragged_rows import CachedRows, VisibleSlots
from specdec.models.linear import with_fast_linears


class HeadRunner(CachedRows):
    """Runs one head.

    Args:
        head: the head, on any device, in any precision.
        embeddings: modules borrowed from the target.
        fast: view of the head that drafts, for example with 8-bit linears. None for the head itself.
        sized: whether passes are padded to a few sizes, so that they can be captured as CUDA graphs.
    """

    def __init__(
        self, head: Eagle3Head, embeddings: BorrowedEmbeddings, fast: Eagle3Head | None = None, sized: bool = False
    ):
        self.sized = sized
        super().__init__([Span(head.config.window)])
        self.head = head
        self._fast = with_fast_linears(head if fast is None else fast)
        head.move_frequencies()
        self.embeddings, self.lm_head = embeddings, embeddings.lm_head
        self._pending_features: Tensor | None = None  # (B, M, H), output at the pending nodes
        self._last: Tensor | None = None  # (B, 1, H), output at each row's last known token

    def start(self, batch_size: int, keeps_all: bool = False) -> None:
        super().start(batch_size, keeps_all)
        self._pending_features = self._last = None

    @torch.no_grad()
    def extend(self, tokens: Tensor, states: Tensor, pads: Sequence[int]) -> Tensor:
        """Append known tokens with the target's states, and drop the pending nodes. See `Follower.extend`."""
        self.drop_draft()
        W = tokens.shape[1]
        for part, part_pads in parts_of(W, prefill_width(W), pads):
            self._read(tokens[:, part], states[:, part], part_pads, drafts=part.stop == W)
        assert self._last is not None
        return self._logits(self._last)

    @torch.no_grad()
    def extend_after(self, tokens: Tensor, states: Tensor, pads: Tensor) -> Tensor:
        """`extend` by few tokens, with row lengths read from `device_lengths`. pads: (B, 1) int64."""
        self.drop_draft()
        visible_slots = self.place_after(tokens.shape[1], pads)
        self._last = self._pass(tokens, self._fused(states), visible_slots, sees_all=False)[:, -1:]
        return self._logits(self._last)

    @torch.no_grad()
    def grow(
        self, tokens: Tensor, parents: Tensor | None, depth: Tensor, ancestors: Tensor | None, chain: bool
    ) -> Tensor:
        """Run the head over n drafted nodes after the rows and the M nodes already pending.

        Args:
            tokens: (B, n) int64.
            parents: (B, n) int64, index of each node's parent among the pending nodes. Its output is the node's
                feature. None for the last pending node, or the last known token if there is none.
            depth: (B, M + n) int64, depth of all nodes; of a chain also of those to come.
            ancestors: (B, n, M + n) bool, the nodes that each new node attends to. Not needed for a chain.
            chain: whether all nodes form a chain.

        Returns:
            Logits (B, n, K).
        """
        assert self._last is not None
        n = tokens.shape[1]
        device = self.head.device
        if chain or parents is None or self._pending_features is None:
            before = self._last if self._pending_features is None else self._pending_features[:, -1:]
            features = before.expand(-1, n, -1)
        else:
            index = parents.to(device)[..., None].expand(-1, -1, self._last.shape[-1])
            features = self._pending_features.gather(1, index)
        sees_all = not self.sized and self.sees_all(n, chain)
        seen = None if chain or ancestors is None else ancestors.to(device)
        visible_slots = self.place_draft(depth.to(device), seen, n)
        h = self._pass(tokens, features, visible_slots, sees_all)
        pending = self._pending_features
        self._pending_features = h if chain or pending is None else torch.cat([pending, h], 1)
        return self._logits(h)

    def drop_draft(self) -> None:
        super().drop_draft()
        self._pending_features = None

    def _read(self, tokens: Tensor, states: Tensor, pads: Sequence[int], drafts: bool) -> None:
        """Append one part of the tokens of `extend`. drafts: whether a draft starts after the last of them."""
        sees_all = not any(pads) and self.sees_all(tokens.shape[1], chain=True)
        visible_slots, features = self.place_known(tokens.shape[1], pads, self.head.device), self._fused(states)
        if drafts or not self.head.can_append_kv:
            self._last = self._pass(tokens, features, visible_slots, sees_all)[:, -1:]
        else:
            self._fast.append_kv(
                self.embeddings.embedded(tokens, self.head), features, visible_slots.positions, self.cache
            )
        self.commit([tokens.shape[1] - pad for pad in pads])

    def _fused(self, states: Tensor) -> Tensor:
        return self._fast.fuse(states.to(self.head.device, self.head.dtype))

    def _pass(self, tokens: Tensor, features: Tensor, visible_slots: VisibleSlots, sees_all: bool) -> Tensor:
        (span,) = self.spans
        causal = visible_slots.alone and (span.window is None or tokens.shape[1] <= span.window)
        unmasked = causal or (sees_all and self.head.device.type != "cpu")
        visible = None if unmasked else visible_slots.visible(span).expand(len(tokens), -1, -1)
        embeds = self.embeddings.embedded(tokens, self.head)
        cos, sin = visible_slots.once("rotation", lambda placed: self._fast.rotation(embeds, placed.positions))
        rotation = cos[:, visible_slots.part], sin[:, visible_slots.part]
        return self._fast(embeds, features, visible_slots.positions, visible, self.cache, rotation)

    def _logits(self, h: Tensor) -> Tensor:
        if self.lm_head is None:
            return self._fast.logits(h)
        return apply_lm_head(self.lm_head, h)
