"""`DominoHead` of Domino (arXiv 2605.29707): corrects a block's logits by a recurrent state of the tokens before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.heads.markov import biased


@dataclass(frozen=True)
class DominoShape:
    """Shape of a `DominoHead`.

    Attributes:
        state_size: r, width of the recurrent state.
        rank: width of the layer before the vocabulary.
        uncorrected: first tokens of a draft whose logits stay as the block drafts them.
    """

    state_size: int
    rank: int
    uncorrected: int = 0


class DominoHead(nn.Module):
    """Low-rank correction computed from the block's hidden state, and from a GRU over the tokens from the anchor on.

    The GRU is written as two matrix products, which run with the kernels that `specdec.models` picks for linear layers.

    Args:
        shape: widths of the parts.
        hidden_size: H, width of the drafter and of the token embeddings.
        draft_vocab_size: K.
    """

    def __init__(self, shape: DominoShape, hidden_size: int, draft_vocab_size: int):
        super().__init__()
        self.shape = shape
        self.input_gates = nn.Linear(hidden_size, 3 * shape.state_size, bias=False)
        self.state_gates = nn.Linear(shape.state_size, 3 * shape.state_size, bias=False)
        self.down_proj = nn.Linear(hidden_size + shape.state_size, shape.rank, bias=False)
        self.up_proj = nn.Linear(shape.rank, draft_vocab_size, bias=False)

    def embedded(self, before: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Embed tokens (B, n) int64 as the drafter does. Returns (B, n, H)."""
        return embed(before)

    def initial_state(self, before: Tensor, hidden: Tensor) -> None:
        """Return None: the state is zero before the anchor."""

    def corrected(
        self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor | None, depth: int
    ) -> tuple[Tensor, Tensor]:
        """See `Correction.corrected`."""
        if state is None:
            state = before.new_zeros(*before.shape[:-1], self.shape.state_size)
        state = self._advanced(before, state)
        if depth < self.shape.uncorrected:
            return logits, state
        inner = nn.functional.silu(self.down_proj(torch.cat([hidden, state], -1)))
        return biased(logits, self.up_proj(inner).to(logits.dtype)), state

    def _advanced(self, before: Tensor, state: Tensor) -> Tensor:
        """Return the state (B, n, r) after the tokens embedded as before (B, n, H)."""
        reset, keep, new = self.input_gates(before).chunk(3, -1)
        old_reset, old_keep, old_new = self.state_gates(state).chunk(3, -1)
        keep = (keep + old_keep).sigmoid()
        candidate = (new + (reset + old_reset).sigmoid() * old_new).tanh()
        return (1 - keep) * candidate + keep * state
