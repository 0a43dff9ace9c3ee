"""`StateHead`: the base class of heads that read the target's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.heads.config import LayerConfig
from specdec.heads.rope import rotary_config


class StateHead(nn.Module):
    """A head whose linear layer `fc` takes the target's states."""

    fc: nn.Linear

    def __init__(self, config: LayerConfig):
        super().__init__()
        with torch.device("cpu"):  # in a tuple, lest `head.to(bfloat16)` round the frequencies
            self._rotary = (LlamaRotaryEmbedding(rotary_config(config)),)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def bring_frequencies(self) -> None:
        """To where the weights are, before passes that are not to wait for it: `.to()` does not know of them."""
        self._rotary[0].to(self.device)

    def rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions (B, n) int64, in the precision of x."""
        return self._rotary[0].to(x.device)(x, positions)


PROMPT = 16  # known tokens at once, from which on it pays to compute of all but the last only what is kept
AT_ONCE = 1024  # known tokens per row that are read together: what is computed of them on the way goes again
