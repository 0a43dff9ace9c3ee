"""`StateHead`: what heads that read the target's states have in common: where they are, and how positions turn them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.eagle3.config import LayerConfig


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


def rotary_config(config: LayerConfig) -> LlamaConfig:
    """transformers computes the frequencies, of every kind of scaling it knows."""
    rope: dict[str, Any] = dict(config.rope)
    covered = int(config.head_dim * rope.pop("partial_rotary_factor", 1.0))
    return LlamaConfig(
        hidden_size=covered,
        num_attention_heads=1,
        head_dim=covered,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
