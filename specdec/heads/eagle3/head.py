"""`Eagle3Head`: predicts the token after next from the target's states and the next token. EAGLE-3, 2503.01840.

    h = fc([low, mid, high])                                 # the target's states at token i
    x = [input_layernorm(embed(token i+1)), hidden_norm(h)]
    h = h + attention(x);  h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))                                # of token i+2, over the draft vocabulary

To draft more tokens, h replaces the states that the target has not computed yet. Embeddings and attention masks are
passed in.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec.heads.base import StateHead
from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.layers import Attention, DecoderLayer, Visible


class Eagle3Head(StateHead):
    """EAGLE head of version 3, or 1 and 2. Parameters have the names of vLLM speculators' checkpoints.

    Args:
        config: shape and variant of the head.

    Buffers:
        d2t: (K,) int64, target id minus draft id of each draft token.

    Example:
        ```python
        head = specdec.heads.eagle3.checkpoint.load("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
        generator = SpeculativeGenerator(target, Eagle3Proposer(head))
        ```
    """

    d2t: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        self.config = config
        H, wide = config.hidden_size, config.target_hidden_size * config.num_taps
        if config.version == 1:
            wide = 2 * H  # [embed, state]
        self.embed_tokens = nn.Embedding(config.vocab_size, H) if config.own_embedding else None
        self.input_norm = LlamaRMSNorm(wide, config.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                LlamaRMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(config.num_taps)
            )
        self.fc = nn.Linear(wide, H, bias=config.fc_bias)
        first = FusingLayer(config) if config.version == 3 else DecoderLayer(config, 0, input_norm=False)
        self.layers = nn.ModuleList([first, *(DecoderLayer(config, i) for i in range(1, config.num_layers))])
        self.norm = LlamaRMSNorm(H, config.rms_norm_eps) if config.version == 3 else None
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False) if config.version == 3 else None
        masked = config.mask_token_id is not None
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, wide)) if masked else None  # replaces unknown states
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    @property
    def draft_to_target(self) -> Tensor:
        """(K,) int64, the target's id of each draft token."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def can_append_kv(self) -> bool:
        """True if `append_kv` is available: keys and values of a single layer do not depend on a layer's output."""
        return self.config.version == 3 and len(self.layers) == 1

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's states.

        Args:
            states: (B, n, taps * target H), the states of all taps, concatenated.

        Returns:
            Features (B, n, H).
        """
        if self.config.version == 1:
            return states
        if self.fc_norm is not None:
            chunks = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        return self.fc(states)

    def forward(
        self,
        embeds: Tensor,
        features: Tensor,
        positions: Tensor,
        visible: Visible,
        cache: Cache | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run one pass over n tokens per row.

        Args:
            embeds: (B, n, E), embeddings of tokens i+1. E is the config's `embedding_size`.
            features: (B, n, H), features of tokens i, from `fuse` or from an earlier pass.
            positions: (B, n) int64, i.
            visible: (B, n, slots) bool, the cache slots that each token attends to. A BlockMask selects flex
                attention. None is causal attention over these n tokens.
            cache: keys and values of earlier tokens. Those of this pass are appended.
            rotation: `rotation` of the positions, if it is known.

        Returns:
            Features (B, n, H), for `logits` and for the next pass.
        """
        rotation = self.rotation(embeds, positions) if rotation is None else rotation
        if self.config.version == 1:
            h = self.fc(torch.cat([embeds, features], -1))
            h = self.layers[0](h, rotation, visible, cache)
        else:
            h = self.layers[0](embeds, features, rotation, visible, cache)
        for layer in list(self.layers)[1:]:
            h = layer(h, rotation, visible, cache)
        return self.norm(h) if self.norm is not None and self.config.norm_output else h

    def append_kv(self, embeds: Tensor, features: Tensor, positions: Tensor, cache: Cache) -> None:
        """Write only keys and values to the cache. Requires `can_append_kv`. Arguments as in `forward`."""
        first = self.layers[0]
        assert self.can_append_kv
        assert isinstance(first, FusingLayer)
        first.append_kv(embeds, features, self.rotation(embeds, positions), cache)

    def logits(self, h: Tensor) -> Tensor:
        """Return logits (B, n, K) for features (B, n, H) from `forward`. EAGLE-1 heads use the target's LM head."""
        assert self.lm_head is not None
        return self.lm_head(self.read_out(h))

    def read_out(self, h: Tensor) -> Tensor:
        """Return the LM head's input (..., H) for features from `forward`."""
        assert self.norm is not None
        return h if self.config.norm_output else self.norm(h)


class FusingLayer(nn.Module):
    """First layer of an EAGLE-3 head. Its attention reads [embedding, feature], both normed, of width E + H."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        E, H = config.embedding_size, config.hidden_size
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(E, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(H, config.rms_norm_eps)
        self.self_attn = Attention(config, 0, E + H)
        self.post_attention_layernorm = LlamaRMSNorm(H, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embeds: Tensor, h: Tensor, rotation: tuple[Tensor, Tensor], visible: Visible, cache: Cache | None
    ) -> Tensor:
        normed = self.hidden_norm(h)
        residual = normed if self.norm_before_residual else h
        h = residual + self.self_attn(self._concatenated(embeds, normed), rotation, visible, cache)
        return h + self.mlp(self.post_attention_layernorm(h))

    def append_kv(self, embeds: Tensor, h: Tensor, rotation: tuple[Tensor, Tensor], cache: Cache) -> None:
        self.self_attn.append_kv(self._concatenated(embeds, self.hidden_norm(h)), rotation, cache)

    def _concatenated(self, embeds: Tensor, normed: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embeds), normed], -1)
