"""`CandidateSelector` of DFlash 2: ranks the block's best tokens at each depth by the token before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SelectorShape:
    """Shape of a `CandidateSelector`.

    Attributes:
        rank: width of the codes of tokens.
        candidates: number of tokens per depth that can be drafted.
    """

    rank: int
    candidates: int


class CandidateSelector(nn.Module):
    """Adds `<code of the token before * projected hidden state, code of the candidate>` to each candidate's logit.

    The candidates are the tokens with the largest logits. All others are never drafted.

    Args:
        shape: widths of the parts.
        hidden_size: H, width of the drafter.
        vocab_size: V.
    """

    def __init__(self, shape: SelectorShape, hidden_size: int, vocab_size: int):
        super().__init__()
        self.candidates = shape.candidates
        self.predecessor_codebook = nn.Embedding(vocab_size, shape.rank)
        self.successor_codebook = nn.Embedding(vocab_size, shape.rank)
        self.hidden_projection = nn.Linear(hidden_size, shape.rank, bias=False)

    def embedded(self, before: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Look up the codes (B, n, rank) of tokens (B, n) int64. embed is not used."""
        return self.predecessor_codebook(before.clamp(max=self.predecessor_codebook.num_embeddings - 1))

    def initial_state(self, before: Tensor, hidden: Tensor) -> None:
        """Return None: there is no state."""

    def corrected(
        self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor | None, depth: int
    ) -> tuple[Tensor, None]:
        """See `Correction.corrected`. Tokens that are no candidates get -inf."""
        known = logits[..., : self.successor_codebook.num_embeddings]  # a target may pad its vocabulary
        best, ids = known.topk(min(self.candidates, known.shape[-1]), -1)  # (B, 1, candidates)
        codes = self.successor_codebook(ids)
        scores = best + ((before * self.hidden_projection(hidden))[..., None, :] * codes).sum(-1).to(best.dtype)
        (B, n), K = before.shape[:2], logits.shape[-1]
        return logits.new_full((B, n, K), -torch.inf).scatter(-1, ids.expand(-1, n, -1), scores), None
