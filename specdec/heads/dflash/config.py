"""`DFlashConfig`: shape of a block drafter, the target states it reads, and its attention masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from specdec.heads.config import LayerConfig
from specdec.heads.dflash.convolution import ConvolutionShape
from specdec.heads.dflash.domino import DominoShape
from specdec.heads.dflash.selector import SelectorShape
from specdec.heads.markov import MarkovKind

CausalLayers = Literal["none", "windows", "all"]


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """Config of a DFlash drafter (2602.06036), or of JetSpec, DSpark, Domino or DFlash 2, which add to it.

    The attributes of `LayerConfig` come on top. `vocab_size` and `draft_vocab_size` are 0 if the checkpoint does not
    give them; then the target's is used.

    Attributes:
        tap_ids: layers of the target whose input states the drafter reads.
        block_size: tokens per pass: the anchor, which is the last known token, and masks.
        from_anchor: whether the output at the anchor drafts a token, too. Otherwise only the masks draft.
        windows: sliding window of each layer in positions back, None for full attention.
        window_from_anchor: whether windows count from the anchor. Otherwise they count from each token.
        causal: layers in which a token of the block sees no later token of it: "none", those with "windows", or "all"
            (JetSpec, 2606.18394).
        own_head: whether the checkpoint has its own LM head. Otherwise the target's is used.
        markov: kind of the Markov head: "vanilla", "gated" or "rnn". None if there is none.
        markov_rank: rank r of the Markov head.
        domino: shape of Domino's head. None if there is none.
        selector: shape of DFlash 2's selector of candidates. None if there is none.
        convolution: shape of DFlash 2's convolutions. None if there are none.
        embedding_scale: factor of the token embeddings.
        logit_scale: factor of the logits, before `logit_softcap`.
        logit_softcap: bound s of the logits: s * tanh(logits / s). None if there is none.
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
    causal: CausalLayers = "none"
    own_head: bool = False
    markov: MarkovKind | None = None
    markov_rank: int = 0
    domino: DominoShape | None = None
    selector: SelectorShape | None = None
    convolution: ConvolutionShape | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
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
        if self.causal not in get_args(CausalLayers):
            raise ValueError(f"causal must be one of {', '.join(get_args(CausalLayers))}, got {self.causal!r}")
        if self.markov is not None and self.markov not in get_args(MarkovKind):
            raise ValueError(f"the Markov head must be one of {', '.join(get_args(MarkovKind))}, got {self.markov!r}")
        if self.confidence_with_markov and self.markov is None:
            raise ValueError("confidence_with_markov needs a Markov head, but markov is None")

        if sum(part is not None for part in (self.markov, self.domino, self.selector)) > 1:
            raise ValueError("a drafter can have one of a Markov head, a Domino head and a selector: remove the others")
        if self.convolution is not None:
            if self.hidden_size % self.convolution.group_size:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is no multiple of the convolution's groups of "
                    f"{self.convolution.group_size}"
                )
            if self.convolution.kernel_size > self.block_size:
                raise ValueError(
                    f"the convolution's kernel of {self.convolution.kernel_size} is larger than a block of "
                    f"{self.block_size}"
                )

    @property
    def kind(self) -> str:
        """Name of the method: "dflash", "jetspec", "dspark", "domino" or "dflash2"."""
        if self.convolution is not None or self.selector is not None:
            return "dflash2"
        if self.domino is not None:
            return "domino"
        if self.markov is not None or self.confidence:
            return "dspark"
        return "jetspec" if self.causal == "all" else "dflash"

    @property
    def is_scaled(self) -> bool:
        """True if embeddings or logits are scaled, which neither training nor the layout of speculators supports."""
        return (self.embedding_scale, self.logit_scale, self.logit_softcap) != (1.0, 1.0, None)

    @property
    def drafted(self) -> int:
        """Number of tokens drafted per pass."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def is_causal(self, window: int | None) -> bool:
        """Return whether a layer with this window is causal within the block."""
        return self.causal == "all" or (self.causal == "windows" and window is not None)

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the target states that the drafter reads, counted as in `specdec.models.hidden_states.Taps`."""
        return self.tap_ids
