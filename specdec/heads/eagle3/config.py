"""`Eagle3Config`: shape of an EAGLE head, and the target states it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.heads.config import LayerConfig
from specdec.models.hidden_states import FINAL


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """Shape and variant of an EAGLE head. The defaults are the paper's (EAGLE-3, 2503.01840) with Llama layers.

    The attributes of `LayerConfig` come on top.

    Attributes:
        sliding_window: number of tokens that each layer attends to, None for all.
        draft_window: the same when it drafts, for a head that was trained on shorter texts than it drafts for.
        tap_ids: target layers whose states are read, as the checkpoint counts them. None for a low, a middle and a
            high layer of any target.
        tap_convention: "entering" counts states entering a layer, "output" those leaving it.
        tap_convention_known: False if the checkpoint does not give the convention. It is then inferred from the
            target's number of layers if one convention yields the paper's states.
        version: 3, or 1 for EAGLE-1 and 2 heads, which read the target's final state and use its LM head.
        norm_before_residual: whether the residual carries the normed feature.
        norm_before_fc: whether one norm is applied over all taps together.
        fc_norm: whether each tap has its own norm.
        norm_output: whether the feature fed back is normed. EAGLE-3.1 has `fc_norm` and `norm_output`.
        fc_bias: whether `fc` has a bias, as some EAGLE-1 heads do.
        block_size: tokens drafted per pass by P-EAGLE heads, which have a `mask_token_id`. 1 for other heads.

    Raises:
        ValueError: a field has an unsupported value.

    Examples:
        >>> shape = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48)
        >>> config = Eagle3Config(**shape, vocab_size=100, draft_vocab_size=40, target_hidden_size=64)
        >>> config.taps(num_target_layers=28)
        (2, 14, 25)
    """

    sliding_window: int | None = None
    draft_window: int | None = None
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
    def window(self) -> int | None:
        """Number of tokens that each layer attends to when the head drafts, None for all."""
        return min(filter(None, (self.sliding_window, self.draft_window)), default=None)

    @property
    def drafted(self) -> int:
        """Number of tokens drafted per pass."""
        return self.block_size

    @property
    def own_head(self) -> bool:
        """True if the checkpoint has its own LM head. Otherwise the target's is used."""
        return self.version == 3

    @property
    def embedding_size(self) -> int:
        """E, width of the head's own embeddings or else of the target's.

        Only the first layer's projections read embeddings, so a head can be narrower than its target.
        """
        return self.hidden_size if self.own_embedding or self.version == 1 else self.target_hidden_size

    @property
    def num_taps(self) -> int:
        if self.version == 1:
            return 1
        return 3 if self.tap_ids is None else len(self.tap_ids)

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the target states that the head reads, counted as in `specdec.models.hidden_states.Taps`.

        Args:
            num_target_layers: number of the target's decoder layers.
        """
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
    """Return the paper's low, middle and high states: those entering layers 2, n // 2 and n - 3."""
    low, high = min(2, num_target_layers), max(0, num_target_layers - 3)
    return low, num_target_layers // 2, high


def infer_convention(tap_ids: Sequence[int], num_target_layers: int) -> str | None:
    """Return the tap convention under which these are the paper's states, or None if there is none."""
    entering = default_taps(num_target_layers)
    if tuple(tap_ids) == entering:
        return "entering"
    return "output" if tuple(tap + 1 for tap in tap_ids) == entering else None
