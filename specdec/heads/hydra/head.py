"""`HydraHeads`: head i drafts from the target's last state and all tokens before its own. Hydra, 2402.05109.

    x = [state, embed(root), embed(drafted token), ...]    # head i reads i drafted tokens
    x = res_connection(x) + silu(linear(x))                # then residual blocks of width H
    logits = lm_head(x)

In Hydra++ a decoder layer (`PrefixLayer`) first attends over the states of the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.heads.base import StateHead
from specdec.heads.config import LayerConfig
from specdec.heads.layers import DecoderLayer, Visible
from specdec.heads.per_token import HeadPerToken, PerTokenConfig
from specdec.models.hidden_states import FINAL


@dataclass(frozen=True)
class HydraConfig(PerTokenConfig):
    """Number and shape of Hydra heads, and the states they read.

    Attributes:
        prefix: shape of the decoder layer over the states (Hydra++). None if the heads read the last state directly.
        state_offset: number of layers before the end that the states are taken at. 0 is the final, normed state.
    """

    prefix: LayerConfig | None = None
    state_offset: int = 0

    own_embedding = False

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        return (num_target_layers - self.state_offset if self.state_offset else FINAL,)


class HydraHeads(HeadPerToken):
    """Hydra heads, one per drafted token. They use the target's embeddings."""

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.config = config
        self.prefix = None if config.prefix is None else PrefixLayer(config.prefix)
        self.heads = nn.ModuleList(HydraHead(config, i) for i in range(config.drafted))


class HydraHead(nn.Module):
    """Residual blocks followed by an LM head. The first block reads the state and the embeddings of i + 1 tokens."""

    def __init__(self, config: HydraConfig, i: int):
        super().__init__()
        H = config.hidden_size
        wide = [(i + 2) * H] + [H] * (config.num_layers - 1)
        self.blocks = nn.ModuleList(ResidualBlock(inputs, H) for inputs in wide)
        self.lm_head = nn.Linear(H, config.vocab_size)

    def forward(self, path: Tensor) -> Tensor:
        """Return logits (..., V). path: (..., (i + 2) * H), the state and the embeddings, concatenated."""
        for block in self.blocks:
            path = block(path)
        return self.lm_head(path)


class ResidualBlock(nn.Module):
    """Residual block. If input and output widths differ, a linear layer projects the residual."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.res_connection = nn.Linear(inputs, outputs) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.res_connection is None else self.res_connection(x)
        return residual + nn.functional.silu(self.linear(x))


class PrefixLayer(StateHead):
    """Decoder layer over the target's states, followed by a norm."""

    def __init__(self, config: LayerConfig):
        super().__init__(config)
        self.layer = DecoderLayer(config, 0)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def append_kv(self, states: Tensor, positions: Tensor, cache: Cache) -> None:
        """Write only the keys and values of the states to the cache. See `forward`."""
        assert self.layer.input_layernorm is not None
        self.layer.self_attn.append_kv(self.layer.input_layernorm(states), self.rotation(states, positions), cache)

    def forward(self, states: Tensor, positions: Tensor, visible: Visible, cache: Cache) -> Tensor:
        """Run the layer over states (B, n, H), which see the slots `visible` (B, n, slots) bool. Normed."""
        return self.norm(self.layer(states, self.rotation(states, positions), visible, cache))
