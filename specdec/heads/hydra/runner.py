"""`HydraRunner`: runs Hydra heads next to a target, over the rows of a batch.

It keeps the path of each drafted node: the state and the embeddings that the next head reads. Only the keys and values
of the prefix layer, if there is one, are kept between rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.heads.base import parts_of, prefill_width
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.hydra.head import HydraHeads, PrefixLayer
from specdec.models.cache.ragged_rows import CachedRows
from specdec.models.linear import with_fast_linears


class HydraRunner:
    """Runs Hydra heads. Arguments as for `HeadRunner`."""

    def __init__(self, head: HydraHeads, embeddings: BorrowedEmbeddings, fast: HydraHeads):
        self.head, self._embeddings, self._fast = head, embeddings, with_fast_linears(fast)
        self._prefix = None if self._fast.prefix is None else PrefixRows(self._fast.prefix)
        self._paths: Tensor  # (B, n, (depth + 2) * H), state and embeddings of the n nodes at the newest depth
        self._first = 0  # index of the first of these nodes among all nodes

    def start(self, batch_size: int) -> None:
        if self._prefix is not None:
            self._prefix.start(batch_size)

    @torch.no_grad()
    def extend(self, tokens: Tensor, states: Tensor, pads: Sequence[int]) -> Tensor:
        """Append known tokens. Returns logits (B, 1, V) after each row's last token. See `Follower.extend`."""
        states = states.to(self.head.device, self.head.dtype)
        state = states[:, -1:] if self._prefix is None else self._prefix.read(states, pads)
        self._paths = torch.cat([state, self._embedded(tokens[:, -1:])], -1)
        return self._fast.heads[0](self._paths)

    @torch.no_grad()
    def logits_after(self, depth: int, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Compute the logits after n drafted tokens.

        Args:
            depth: length of the draft up to and including these tokens.
            tokens: (B, n) int64.
            parents: (B, n) int64, index of each token's parent among all nodes. None for the last node, or the root.

        Returns:
            Logits (B, n, V).
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
        """Do nothing: the next `extend` replaces the paths."""

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self._embeddings.embedded(tokens, self.head)


class PrefixRows(CachedRows):
    """Cache of a prefix layer. Slot i of a row holds the keys and values of the target's state at token i."""

    def __init__(self, layer: PrefixLayer):
        super().__init__()
        self.layer = layer
        layer.move_frequencies()

    def read(self, states: Tensor, pads: Sequence[int]) -> Tensor:
        """Append states (B, W, H), row b left-padded by pads[b]. Returns the output (B, 1, H) at each row's last."""
        B, W = states.shape[:2]
        for part, part_pads in parts_of(W, prefill_width(W), pads):
            width = part.stop - part.start
            slots = self.place_known(width, part_pads, states.device)
            if part.stop < W:
                self.layer.append_kv(states[:, part], slots.positions, self.cache)
            else:
                visible = None if slots.alone else slots.visible(self.spans[0]).expand(B, -1, -1)
                out = self.layer(states[:, part], slots.positions, visible, self.cache)
            self.commit([width - pad for pad in part_pads])
        return out[:, -1:]
