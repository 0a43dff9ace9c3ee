"""`MtpHead`: a target's MTP layers, built from its own type of decoder layers. DeepSeek-V3, 2412.19437, section 2.2.

    x = fuse([embed_norm(embed(token i+1)), state_norm(h_i)])   # h_i: the target's final, normed state at token i
    h' = norm(block(x))                                        # the block attends to all earlier x
    logits = lm_head(h')                                       # of token i+2, with the target's LM head

The next MTP layer reads h' together with token i+2. The last layer reads its own h' in place of h_{i+1}.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.hidden_states import FINAL, Taps


class MtpLayer(nn.Module):
    """One MTP layer.

    Args:
        embed_norm: norm of the embedding, over H.
        state_norm: norm of the state, over H.
        fuse: linear layer from 2H to H.
        block: causal LM of the target's class with the MTP layer's decoder layers and final norm. Its LM head is an
            identity.
        states_first: whether `fuse` reads the state before the embedding.
    """

    def __init__(
        self,
        embed_norm: nn.Module,
        state_norm: nn.Module,
        fuse: nn.Linear,
        block: PreTrainedModel,
        states_first: bool = False,
    ):
        super().__init__()
        self.embed_norm, self.state_norm, self.fuse, self.block = embed_norm, state_norm, fuse, block
        self.states_first = states_first
        self.taps = Taps(block, [FINAL])  # the block's output

    def fused(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Fuse embeddings (B, n, H) of tokens i+1 and states (B, n, H) at i into the block's input (B, n, H)."""
        pair = [self.embed_norm(embeds), self.state_norm(states)]
        return self.fuse(torch.cat(pair[::-1] if self.states_first else pair, -1))


class MtpLayers(nn.Module):
    """MTP layers, in the order in which they draft. The last one also drafts all further tokens."""

    def __init__(self, layers: Sequence[MtpLayer]):
        super().__init__()
        self._layers = nn.ModuleList(layers)

    @property
    def layers(self) -> list[MtpLayer]:
        return list(self._layers)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.layers[0].fuse.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].fuse.weight.dtype


class MtpHead(MtpLayers):
    """All MTP layers of a target, with the target's embedding and LM head."""

    def __init__(self, layers: Sequence[MtpLayer], embedding: nn.Module, lm_head: nn.Module):
        super().__init__(layers)
        self.embedding, self.lm_head = embedding, lm_head
