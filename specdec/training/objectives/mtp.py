"""Training objective of MTP layers (2412.19437, section 2.2).

Each step drafts with the next layer. The steps after the last layer reuse it on its own output, as in decoding:
EAGLE-3's training-time test (2503.01840, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from specdec.heads.mtp.trainable import MtpTrainee
from specdec.models.attention_masks import default_masks, masks_as_taken
from specdec.models.cache.buffers import Span
from specdec.models.introspection import cache_argument
from specdec.training.objectives.eagle3 import Objective
from specdec.training.objectives.unroll import Drafted, positions_in


class MtpObjective(Objective):
    """Objective of MTP layers. Takes the arguments of `Objective`.

    Raises:
        ValueError: The target's logits have a bias or a cap.
    """

    head: MtpTrainee

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        readout = self._target_logits
        if readout.bias is not None or readout.cap is not None:
            raise ValueError(
                "MTP layers cannot be trained for a target whose logits have a bias or a cap: choose another --kind"
            )
        self._frozen_lm_head = (readout.weight * readout.scale if readout.scale != 1 else readout.weight,)  # frozen

    def _unrolled(self, ids: Tensor, learn: Tensor, documents: Tensor, taps: Tensor, steps: int) -> Iterator[Drafted]:
        return map(Drafted, unroll_mtp(self.head, self._embed(ids), taps, steps, documents))

    def _weight(self) -> Tensor:
        return self._frozen_lm_head[0].to(self.head.device)


def unroll_mtp(
    head: MtpTrainee, embeds: Tensor, states: Tensor, steps: int, documents: Tensor | None = None
) -> Iterator[Tensor]:
    """Compute the layers' output at each step, given the true tokens. Arguments and yields as for `unroll`."""
    B, T, _ = embeds.shape
    L = T - 1  # rows: the last token has no successor to pair with
    documents = embeds.new_zeros(B, T, dtype=torch.long) if documents is None else documents
    documents = documents[:, :L]
    position, row = positions_in(documents), torch.arange(L, device=embeds.device)
    before = (row <= row[:, None]) & (documents[:, None] == documents[..., None])  # (B, L, L)
    same = (row == row[:, None]).expand(B, -1, -1)
    caches = [DynamicCache() for _ in head.layers]
    out = states[:, :L]
    for step in range(steps):
        k = min(step, len(head.layers) - 1)
        again = step - k  # passes of this layer over its own output
        visible = torch.cat([before] + [same] * again, -1)
        keys = torch.cat([position + passed for passed in range(again + 1)], -1)
        here, layer = position + again, head.layers[k]

        def seen(span: Span, visible: Tensor = visible, keys: Tensor = keys, here: Tensor = here) -> Tensor:
            return visible if span.window is None else visible & _near(span, here[..., None], keys[:, None])

        shifted = pad(embeds[:, 1 + step :], (0, 0, 0, step))  # the padding after the text is never scored
        out = layer.block.get_decoder()(
            inputs_embeds=layer.fused(shifted, out),
            attention_mask=masks_as_taken(layer.block, default_masks(layer.block), seen),
            position_ids=here,
            **{cache_argument(layer.block.get_decoder()): caches[k]},
            use_cache=True,
        )[0]
        yield out[:, : L - step]


def _near(span: Span, here: Tensor, keys: Tensor) -> Tensor:
    assert span.window is not None
    return keys // span.window == here // span.window if span.chunked else keys > here - span.window
