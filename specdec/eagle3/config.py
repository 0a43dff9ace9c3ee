"""`Eagle3Config`: what a head is built of and which of the target's states it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.taps import FINAL


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


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """Shape and variant of a head. The defaults are the paper's (2503.01840) on a Llama layer, the first a fusing one.

    Attributes:
        sliding_window: tokens a layer looks back; None: all.
        tap_ids: the target's states, as the checkpoint counts them; None: low, middle and high of any target.
        tap_convention: "entering" counts states entering a layer, "output" those leaving it.
        tap_convention_known: False where the checkpoint does not say; then the target's number of layers decides if
            one way of counting gives the paper's states.
        version: 3, or 1 for EAGLE-1 and 2 heads, which read the target's final state and its LM head.
        norm_before_residual: the residual carries the normed feature. norm_before_fc: one norm over all taps.
        fc_norm: a norm per tap. norm_output: the feature fed back is normed (3.1 = fc_norm + norm_output).
        fc_bias: EAGLE-1's fusing layer may have one.
        block_size: tokens drafted in a pass, of P-EAGLE heads, which have a `mask_token_id`; 1: of others.
    """

    sliding_window: int | None = None
    tap_ids: tuple[int, ...] | None = None
    tap_convention: str = "entering"
    tap_convention_known: bool = True
    version: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    block_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tap_convention not in ("entering", "output"):
            raise ValueError(f'tap_convention must be "entering" or "output", got {self.tap_convention!r}')
        if self.version not in (1, 3):
            raise ValueError(f"version must be 1 (EAGLE-1 and 2) or 3, got {self.version}")

    @property
    def drafted(self) -> int:
        """Tokens drafted in a pass."""
        return self.block_size

    @property
    def embedding_size(self) -> int:
        """E, of the target's embeddings where it has none of its own. Only the first layer's projections see them:
        nothing else of a head need be as wide as its target.
        """
        return self.hidden_size if self.own_embedding or self.version == 1 else self.target_hidden_size

    @property
    def num_taps(self) -> int:
        if self.version == 1:
            return 1
        return 3 if self.tap_ids is None else len(self.tap_ids)

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """Which of a target's states, counted as `specdec.taps.Taps` does (entering layers)."""
        if self.version == 1:
            return (FINAL,)
        if self.tap_ids is None:
            return default_taps(num_target_layers)
        convention = self.tap_convention
        if not self.tap_convention_known:
            convention = infer_convention(self.tap_ids, num_target_layers) or convention
        shift = 1 if convention == "output" else 0
        return tuple(tap + shift for tap in self.tap_ids)


def default_taps(num_target_layers: int) -> tuple[int, int, int]:
    """The paper's low, middle and high state, as they enter layers 2, n // 2 and n - 3."""
    low, high = min(2, num_target_layers), max(0, num_target_layers - 3)
    return low, num_target_layers // 2, high


def infer_convention(tap_ids: Sequence[int], num_target_layers: int) -> str | None:
    """Which way of counting makes these the paper's states; None if neither does."""
    entering = default_taps(num_target_layers)
    if tuple(tap_ids) == entering:
        return "entering"
    return "output" if tuple(tap + 1 for tap in tap_ids) == entering else None
