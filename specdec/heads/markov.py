"""`MarkovHead` and `ConfidenceHead` of DSpark: what the token before says of the next one, and how sure the draft is.

Knows nothing of the block that their input comes from.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """A bias on a token's logits that follows from the token before, of low rank r: `markov_w2(markov_w1[before])`.

    "gated" scales the embedding by a gate of the block's state there; "rnn" carries a state from token to token.
    """

    def __init__(self, kind: MarkovKind, rank: int, vocab_size: int, draft_vocab_size: int, hidden_size: int):
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def embedded(self, before: Tensor) -> Tensor:
        """(..., r) of tokens (...) int64."""
        return self.markov_w1(before.clamp(max=self.markov_w1.num_embeddings - 1))  # a target may have padding tokens

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What comes behind some tokens.

        Args:
            before: (B, n, r), `embedded`. hidden: (B, n, H), the block's states where the next token is drafted.
            state: (B, n, r) carried up to there; None: nothing was.

        Returns:
            The bias (B, n, K), and the state to carry on (B, n, r); None but for "rnn".
        """
        x, state = self.read(before, hidden, state)
        return self.markov_w2(x), state

    def read(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As `forward`, with what `markov_w2` makes the bias of, (B, n, r), in its place."""
        if self.kind == "rnn":
            state = torch.zeros_like(before) if state is None else state
            gate, candidate, out = self.joint_proj(torch.cat([state, before, hidden], -1)).chunk(3, -1)
            keep = gate.sigmoid()
            return out.tanh(), keep * state + (1 - keep) * candidate.tanh()
        if self.kind == "gated":
            before = before * self.gate_proj(torch.cat([hidden, before], -1)).sigmoid()
        return before, None


class ConfidenceHead(nn.Module):
    """The chance that a drafted token is accepted where all before it were."""

    def __init__(self, input_size: int):
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(..., input) as (...) float32."""
        return self.proj(x)[..., 0].float().sigmoid()


MarkovKind = Literal["vanilla", "gated", "rnn"]
