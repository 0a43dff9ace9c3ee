"""`MarkovHead` and `ConfidenceHead` of DSpark: a bias from the previous token, and an estimate of acceptance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn


def biased(logits: Tensor, bias: Tensor) -> Tensor:
    """Add a bias (B, n, K) to logits (B, 1, V). A target may have more tokens than a head, or fewer.

    Examples:
        >>> biased(torch.zeros(1, 1, 3), torch.ones(1, 1, 2))
        tensor([[[1., 1., 0.]]])
    """
    missing = logits.shape[-1] - bias.shape[-1]
    return logits + (nn.functional.pad(bias, (0, missing)) if missing else bias)


class MarkovHead(nn.Module):
    """Low-rank bias on a token's logits, computed from the previous token: `markov_w2(markov_w1[before])`.

    Args:
        kind: "vanilla" for the bias above, "gated" to scale the embedding by a gate computed from the block's hidden
            state, "rnn" to carry a recurrent state from token to token.
        rank: r.
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

    def embedded(self, before: Tensor, embed: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Embed tokens (...) int64. Returns (..., r). embed is not used."""
        return self.markov_w1(before.clamp(max=self.markov_w1.num_embeddings - 1))  # a target may pad its vocabulary

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the bias for the tokens after n previous tokens.

        Args:
            before: (B, n, r), embeddings of the previous tokens from `embedded`.
            hidden: (B, n, H), the block's hidden states at the depth that is drafted.
            state: (B, n, r), recurrent state so far. None for zeros.

        Returns:
            The bias (B, n, K), and the new recurrent state (B, n, r). The state is None unless `kind` is "rnn".
        """
        x, state = self.read(before, hidden, state)
        return self.markov_w2(x), state

    def initial_state(self, before: Tensor, hidden: Tensor) -> Tensor | None:
        """Return the state (B, 1, r) with which a block begins whose anchor drafts nothing: after the anchor.

        before: (B, 1, r), embedding of the anchor. hidden: (B, 1, H), the block's hidden state there.
        """
        return self.read(before, hidden, None)[1]

    def corrected(
        self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor | None, depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """See `Correction.corrected`."""
        bias, state = self(before, hidden, state)
        return biased(logits, bias), state

    def read(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the input (B, n, r) of `markov_w2` and the new recurrent state. See `forward`."""
        if self.kind == "rnn":
            state = torch.zeros_like(before) if state is None else state
            gate, candidate, out = self.joint_proj(torch.cat([state, before, hidden], -1)).chunk(3, -1)
            keep = gate.sigmoid()
            return out.tanh(), keep * state + (1 - keep) * candidate.tanh()
        if self.kind == "gated":
            before = before * self.gate_proj(torch.cat([hidden, before], -1)).sigmoid()
        return before, None


class ConfidenceHead(nn.Module):
    """Linear head that estimates how likely a drafted token is accepted if all tokens before it were."""

    def __init__(self, input_size: int):
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., input_size) to probabilities (...) float32."""
        return self.proj(x)[..., 0].float().sigmoid()


MarkovKind = Literal["vanilla", "gated", "rnn"]
