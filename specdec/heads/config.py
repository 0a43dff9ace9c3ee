"""`LayerConfig`: shape of the decoder layers of a draft head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Shape of Llama or Qwen3 decoder layers in a draft head, and the vocabulary it drafts from.

    Attributes:
        hidden_size: H, width of the head.
        vocab_size: V, size of the target's vocabulary.
        draft_vocab_size: K, number of tokens that the head can draft.
        target_hidden_size: width of the target's states. It may differ from `hidden_size`.
        num_layers: number of decoder layers.
        attention_bias: whether the q, k and v projections have a bias.
        output_bias: whether the o projection has a bias.
        qk_norm: whether queries and keys are normed per head before RoPE, as in Qwen3.
        rope: `rope_parameters` of transformers. The base defaults to 10000, never to the target's.
        own_embedding: whether the checkpoint has its own token embedding. Otherwise the target's is used.
        mask_token_id: placeholder for tokens not yet known, in heads that draft several tokens per pass.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_hidden_size: int
    num_layers: int = 1
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 4096
    own_embedding: bool = False
    mask_token_id: int | None = None

    @property
    def embedding_size(self) -> int:
        """Width of the token embeddings that the head reads."""
        return self.hidden_size

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is larger than vocab_size {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key-value heads"
            )
