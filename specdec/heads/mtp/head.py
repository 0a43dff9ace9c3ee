"""`MtpHead`: a target's MTP layers, around decoder layers of its own kind. DeepSeek-V3, 2412.19437, section 2.2.

    x = fuse([embed_norm(embed(token i+1)), state_norm(h_i)])   # h_i: the target's last state at token i, normed
    h' = norm(block(x))                                        # the block attends to all x before
    logits = lm_head(h')                                       # the target's own; of token i+2
    h' goes into the next MTP layer with token i+2, or into the same one as if it were h_{i+1}

Knows nothing of rows, trees or files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.hidden_states import FINAL, Taps


class MtpLayer(nn.Module):
    """One layer.

    Args:
        embed_norm, state_norm: each over H. fuse: 2H to H. block: a causal LM of the target's kind with as many decoder
            layers as the MTP layer has and the norm behind them, without an LM head (an identity in its place).
        states_first: the state goes before the embedding.
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
        self.taps = Taps(block, [FINAL])  # of what the block puts out

    def fused(self, embeds: Tensor, states: Tensor) -> Tensor:
        """(B, n, H): what the block reads of the embeddings (B, n, H) of tokens i+1 and the states (B, n, H) at i."""
        pair = [self.embed_norm(embeds), self.state_norm(states)]
        return self.fuse(torch.cat(pair[::-1] if self.states_first else pair, -1))


class MtpHead(nn.Module):
    """All of a target's MTP layers, with the target's own embedding and LM head.

    Args:
        layers: in the order in which they draft; the last is used again for whatever is drafted beyond.
    """

    def __init__(self, layers: Sequence[MtpLayer], embedding: nn.Module, lm_head: nn.Module):
        super().__init__()
        self._layers = nn.ModuleList(layers)
        self.embedding, self.lm_head = embedding, lm_head

    @property
    def layers(self) -> list[MtpLayer]:
        return list(self._layers)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.layers[0].fuse.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].fuse.weight.dtype
