"""`LayerConfig`: the decoder layers of a draft head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Shape of a decoder layer, of Llama's or Qwen3's kind, and what its head drafts.

    Attributes:
        hidden_size: H, width of the head. target_hidden_size: of the target's states, which may be others.
        vocab_size: V, the target's. draft_vocab_size: K, what the head can draft.
        num_layers: decoder layers.
        attention_bias: of the q, k and v projections. output_bias: of the o projection.
        qk_norm: a norm per head before RoPE (Qwen3 layers).
        rope: transformers' `rope_parameters`, base 10000 where a checkpoint is silent: never the target's.
        own_embedding: the checkpoint brings its own token embedding; else the target's is used.
        mask_token_id: the token that stands for those not known yet, in heads that draft several tokens in a pass.
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
        """Width of the embeddings it reads."""
        return self.hidden_size

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is above vocab_size {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key-value heads"
            )
