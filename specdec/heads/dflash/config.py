"""`DFlashConfig`: shape of a block drafter, the target states it reads, and its attention windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from specdec.heads.config import LayerConfig
from specdec.heads.markov import MarkovKind


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """Config of a DFlash drafter (2602.06036), or of DSpark, which adds a Markov and a confidence head.

    The attributes of `LayerConfig` come on top. `vocab_size` and `draft_vocab_size` are 0 if the checkpoint does not
    give them; then the target's is used.

    Attributes:
        tap_ids: layers of the target whose input states the drafter reads.
        block_size: tokens per pass: the anchor, which is the last known token, and masks.
        from_anchor: whether the output at the anchor drafts a token, too. Otherwise only the masks draft.
        windows: sliding window of each layer in positions back, None for full attention.
        window_from_anchor: whether windows count from the anchor. Otherwise they count from each token.
        causal_windows: whether layers with a window are causal within the block. Other layers never are.
        own_head: whether the checkpoint has its own LM head. Otherwise the target's is used.
        markov: kind of the Markov head: "vanilla", "gated" or "rnn". None if there is none.
        markov_rank: rank r of the Markov head.
        confidence: whether there is a head that estimates how likely each token is accepted.
        confidence_with_markov: whether the confidence head also reads the Markov embedding of the previous token.

    Raises:
        ValueError: fields contradict each other.

    Examples:
        >>> shape = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48)
        >>> shape |= dict(vocab_size=9, draft_vocab_size=9, target_hidden_size=32, mask_token_id=8)
        >>> DFlashConfig(**shape, tap_ids=(1, 3), windows=(None,), block_size=8).drafted
        7
    """

    tap_ids: tuple[int, ...]
    block_size: int
    from_anchor: bool = False
    windows: tuple[int | None, ...]
    window_from_anchor: bool = False
    causal_windows: bool = False
    own_head: bool = False
    markov: MarkovKind | None = None
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_token_id is None:
            raise ValueError("mask_token_id is None: a block drafter needs one")
        if self.drafted < 1:
            raise ValueError(f"block_size {self.block_size} leaves no token to draft: increase it")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers: expected one window per layer")
        if any(window is not None and window < self.block_size for window in self.windows):
            raise ValueError(f"windows {self.windows} are smaller than a block of {self.block_size}")
        if self.markov is not None and self.markov not in get_args(MarkovKind):
            raise ValueError(f"the Markov head must be one of {', '.join(get_args(MarkovKind))}, got {self.markov!r}")
        if self.confidence_with_markov and self.markov is None:
            raise ValueError("confidence_with_markov needs a Markov head, but markov is None")

    @property
    def drafted(self) -> int:
        """Number of tokens drafted per pass."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the target states that the drafter reads, counted as in `specdec.models.hidden_states.Taps`."""
        return self.tap_ids
