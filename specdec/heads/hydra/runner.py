"""`HydraRunner`: runs Hydra's heads beside a target, over the rows of a batch.

Owns the path of each drafted node: what the head behind it reads. Kept between rounds is what the layer over the
target's states made of them, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.heads.base import AT_ONCE, PROMPT
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.hydra.head import HydraHeads, PrefixLayer
from specdec.models.cache.ragged_rows import CachedRows, pads_of_part
from specdec.models.linear import with_fast_linears


class HydraRunner:
    """Runs the heads.

    Args:
        head: on any device, in any precision. embeddings: by its target. fast: a view of the head that drafts in its place.
    """

    def __init__(self, head: HydraHeads, embeddings: BorrowedEmbeddings, fast: HydraHeads):
        self.head, self._embeddings, self._fast = head, embeddings, with_fast_linears(fast)
        self._prefix = None if self._fast.prefix is None else PrefixRows(self._fast.prefix)
        self._paths: Tensor  # (B, n, (depth + 2) * H) of the newest depth's nodes: state and embeddings
        self._first = 0  # place of the first of these among all nodes

    def start(self, batch_size: int) -> None:
        if self._prefix is not None:
            self._prefix.start(batch_size)

    @torch.no_grad()
    def extend(self, tokens: Tensor, states: Tensor, pads: Sequence[int]) -> Tensor:
        """Take in known tokens; logits (B, 1, V) behind each row's last one. See `Follower.extend`."""
        states = states.to(self.head.device, self.head.dtype)
        state = states[:, -1:] if self._prefix is None else self._prefix.read(states, pads)
        self._paths = torch.cat([state, self._embedded(tokens[:, -1:])], -1)
        return self._fast.heads[0](self._paths)

    @torch.no_grad()
    def behind(self, depth: int, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Logits (B, n, V) behind n drafted tokens.

        Args:
            depth: tokens drafted up to there, these included. tokens: (B, n) int64.
            parents: (B, n) int64, places among all nodes so far; None: the last one, or the root.
        """
        if parents is None:
            before = self._paths[:, -1:].expand(-1, tokens.shape[1], -1)
        else:
            place = parents.to(self._paths.device) - self._first
            before = self._paths.gather(1, place[..., None].expand(-1, -1, self._paths.shape[-1]))
        self._first = 0 if depth == 1 else self._first + self._paths.shape[1]
        self._paths = torch.cat([before, self._embedded(tokens)], -1)
        return self._fast.heads[depth](self._paths)

    def drop_draft(self) -> None:
        """Nothing is kept of it."""

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self._embeddings.embedded(tokens, self.head)


class PrefixRows(CachedRows):
    """Slot i of a row holds the layer's keys and values of the target's state at token i, at position i."""

    def __init__(self, layer: PrefixLayer):
        super().__init__()
        self.layer = layer
        layer.bring_frequencies()

    def read(self, states: Tensor, pads: Sequence[int]) -> Tensor:
        """Append states (B, W, H), row b left-padded by pads[b]; what the layer makes of each row's last, (B, 1, H)."""
        W = states.shape[1]
        prompt = W - 1 if W >= PROMPT else 0  # of all but the last only what is kept
        for start in range(0, prompt, AT_ONCE):
            self._append(states[:, start : min(start + AT_ONCE, prompt)], start, pads, whole=False)
        out = self._append(states[:, prompt:], prompt, pads, whole=True)
        assert out is not None
        return out[:, -1:]

    def _append(self, states: Tensor, start: int, pads: Sequence[int], whole: bool) -> Tensor | None:
        """`read` of the columns from `start` on; whole: more than keys and values is wanted of them."""
        width, out = states.shape[1], None
        pads = pads_of_part(pads, start, width)
        visible_slots = self.place_known(width, pads, states.device)
        if whole:
            visible = None if visible_slots.alone else visible_slots.visible(self.spans[0]).expand(len(states), -1, -1)
            out = self.layer(states, visible_slots.positions, visible, self.cache)
        else:
            self.layer.remember(states, visible_slots.positions, self.cache)
        self.commit([width - pad for pad in pads])
        return out
