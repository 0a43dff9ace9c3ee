"""`DFlashConfig`: what a block-parallel drafter is built of, which of the target's states it reads, what it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from specdec.heads.config import LayerConfig
from specdec.heads.markov import MarkovKind


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """DFlash (2602.06036), and DSpark, which is DFlash with a Markov and a confidence head.

    `vocab_size` and `draft_vocab_size` are 0 where the checkpoint does not say: the target's.

    Attributes:
        tap_ids: the target's states, as they enter its layers.
        block_size: tokens of a pass: the text's last one, the anchor, and masks.
        from_anchor: the anchor's output drafts, too; else only the masks' do.
        windows: for each layer, how many positions back it looks; None: all.
        window_from_anchor: these count from the anchor; else each token's own count from itself.
        causal_windows: in layers with a window, a token of the block sees those before it alone.
        own_head: the checkpoint brings its own LM head; else the target's is used.
        markov: kind of the head that makes a token's logits depend on the token before; None: it has none.
        markov_rank: r. confidence: it has a head that says how likely a token is to be accepted.
        confidence_with_markov: that head reads the Markov head's embedding of the token before.
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
            raise ValueError("a block-parallel drafter needs a mask_token_id")
        if self.drafted < 1:
            raise ValueError(f"block_size {self.block_size} leaves no token to draft")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if any(window is not None and window < self.block_size for window in self.windows):
            raise ValueError(f"windows {self.windows} are smaller than a block of {self.block_size}")
        if self.markov is not None and self.markov not in get_args(MarkovKind):
            raise ValueError(f"the Markov head must be one of {', '.join(get_args(MarkovKind))}, got {self.markov!r}")
        if self.confidence_with_markov and self.markov is None:
            raise ValueError("the confidence head reads a Markov head's embedding, and there is none")

    @property
    def drafted(self) -> int:
        """Tokens drafted in a pass."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """Which of a target's states, counted as `specdec.models.hidden_states.Taps` does."""
        return self.tap_ids
