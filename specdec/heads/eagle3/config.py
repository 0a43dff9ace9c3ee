"""`Eagle3Config`: what a head is built of and which of the target's states it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.heads.config import LayerConfig
from specdec.models.hidden_states import FINAL


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
        """Which of a target's states, counted as `specdec.models.hidden_states.Taps` does (entering layers)."""
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
