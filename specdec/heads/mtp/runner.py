"""`MtpRunner`: runs a target's MTP layers next to it, over the rows of a batch.

Each layer has its own cache. Entry i of layer k pairs a state at token i with token i+1+k. The state is the target's
for k = 0, else the output of layer k-1. Entries computed from drafted tokens are discarded after every round, and the
accepted tokens are appended again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.heads.embeddings import apply_lm_head, to_device_of
from specdec.heads.mtp.head import MtpHead
from specdec.models.cache.ragged_rows import CachedRows
from specdec.models.linear import with_fast_linears
from specdec.models.runner import ModelRunner
from specdec.models.views import in_eval_mode
from specdec.utils.device_copies import uploaded


class MtpRunner:
    """Runs MTP layers. Layer k drafts the k-th token after the root. The last layer also drafts all further tokens.

    sized: whether draft passes are padded to a few sizes, so that they can be captured as CUDA graphs.
    """

    def __init__(self, head: MtpHead, sized: bool = False):
        self.head = with_fast_linears(head)
        self.layers = [
            ModelRunner(in_eval_mode(layer.block), taps=layer.taps, sized=sized) for layer in self.head.layers
        ]
        self._last: list[Tensor] = []  # (B, 1, H) for each layer, output at each row's last known entry
        self._drafted: list[Tensor] = []  # (B, M, H) for each layer, output at the draft's nodes it has run over
        self._start_draft()

    def start(self, batch_size: int) -> None:
        for runner in self.layers:
            runner.start(batch_size)
        weight = self.head.layers[0].fuse.weight
        self._last = [weight.new_zeros(batch_size, 1, len(weight)) for _ in self.layers]
        self._start_draft()

    def _start_draft(self) -> None:
        self._drafted = [last[:, :0] for last in self._last]
        self._parents: Tensor | None = None  # (B, M) int64, 1 + index of each node's parent, 0 for the root
        self._seen: Tensor | None = None  # (B, M, M) bool, the nodes that each node attends to

    def drop_draft(self) -> None:
        """Discard the draft's nodes."""
        for runner in self.layers:
            runner.drop_draft()
        self._start_draft()

    @torch.no_grad()
    def extend(self, tokens: Tensor, states: Tensor, pads: Sequence[int]) -> Tensor:
        """Append known tokens with the target's states. See `Follower.extend`."""
        self.drop_draft()
        embeds, W, pads = self._embedded(tokens), tokens.shape[1], list(pads)
        states = states.to(embeds)
        for k, runner in enumerate(self.layers):
            first, before = [length == 0 for length in runner.lengths], self._last[k]
            if min(pads) == W:  # all texts are too short for this layer
                break
            out = runner.extend(self.head.layers[k].fused(embeds, states), pads, embedded=True).features
            assert out is not None
            has_new = [count < W for count in pads]
            self._last[k] = out[:, -1:]
            if not all(has_new):
                self._last[k] = torch.where(uploaded(has_new, out.device).bool()[:, None, None], out[:, -1:], before)
            # The next layer pairs the same tokens with this layer's outputs, shifted by one.
            states = out.roll(1, 1)
            for b, count in enumerate(pads):
                if count < W:
                    states[b, count] = before[b, 0]
            pads = [min(W, count + new) for count, new in zip(pads, first, strict=True)]
        self._start_draft()
        return apply_lm_head(self.head.lm_head, self._last[0])

    @property
    def rows(self) -> CachedRows:
        """Cached rows of the only layer. Requires that there is one layer."""
        (runner,) = self.layers
        return runner

    @torch.no_grad()
    def extend_after(self, tokens: Tensor, states: Tensor, pads: Tensor) -> Tensor:
        """`extend` the only layer by few tokens, with row lengths read from `device_lengths`. pads: (B, 1) int64."""
        (layer,), (runner,), embeds = self.head.layers, self.layers, self._embedded(tokens)
        out = runner.extend_after(layer.fused(embeds, states.to(embeds)), pads, embedded=True).features
        assert out is not None
        self._last = [out[:, -1:]]
        self._start_draft()
        return apply_lm_head(self.head.lm_head, self._last[0])

    @torch.no_grad()
    def grow(
        self,
        tokens: Tensor,
        n: int,
        parents: Tensor | None,
        depth: Tensor,
        seen: Tensor | None,
        level: int,
        chain: bool,
    ) -> Tensor:
        """Run a layer over the newest n nodes of a draft, or over all M nodes if it has not run in this draft yet.

        Args:
            tokens: (B, M) int64, all nodes without the root.
            n: number of the newest nodes.
            parents: (B, n) int64, index of each new node's parent. None for the node before, or the root.
            depth: (B, M) int64, depth of all nodes; of a chain also of those to come.
            seen: (B, n, M) bool, the nodes that each new node attends to. None for a chain.
            level: level of the new nodes, 1 for the root's children.
            chain: whether all nodes form a chain.

        Returns:
            Logits (B, n, V).
        """
        M = tokens.shape[1]
        device = self.head.device
        above = torch.full_like(tokens[:, :n], M - n) if parents is None else parents + 1
        self._parents = above.to(device) if self._parents is None else torch.cat([self._parents, above.to(device)], 1)
        if seen is not None:
            seen = seen.to(device)
            self._seen = seen if self._seen is None else torch.cat([pad(self._seen, (0, n)), seen], 1)
        k = min(level, len(self.layers) - 1)
        fresh = level == k  # this layer has not run in this draft yet
        source, run = (k - 1, M) if fresh else (k, n)
        outputs = torch.cat([self._last[source], self._drafted[source]], 1)  # at the root and the nodes
        index = self._parents[:, M - run :, None].expand(-1, -1, outputs.shape[-1])
        embeds = self._embedded(tokens[:, M - run :])
        x = self.head.layers[k].fused(embeds, outputs.gather(1, index))
        seen = None if self._seen is None else self._seen[:, M - run :]
        out = self.layers[k].grow(x, depth, seen, chain=chain, embedded=True).features
        assert out is not None
        self._drafted[k] = out if fresh else torch.cat([self._drafted[k], out], 1)
        return apply_lm_head(self.head.lm_head, out[:, -n:])

    def _embedded(self, tokens: Tensor) -> Tensor:
        tokens = to_device_of(next(self.head.embedding.parameters()), tokens)
        return self.head.embedding(tokens).to(self.head.device, self.head.dtype)
