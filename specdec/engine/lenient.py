"""`Lenient`: a lossy rule that says how much it loses: drafts hardly worse than the target's choice are taken.

Owns what a token may lose, and what a row has lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.verifier import SequentialVerifier
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise


@dataclass(frozen=True)
class Lenient:
    """LOSSY: a drafted token is good enough if the target's own choice is hardly better.

    By how much is its regret: the distance of processed scores, log p up to a constant, at T > 0 less the log of the
    noise of sampling. (For greedy decoding: https://github.com/huggingface/transformers/issues/48636.)

    Args:
        gap: most regret of a token, in nats. budget: most regret of all tokens of a row in a call, in nats.
    """

    gap: float = 0.5
    budget: float = float("inf")

    def __post_init__(self) -> None:
        if not self.gap >= 0 or not self.budget >= 0:
            raise ValueError(f"gap and budget must be at least 0, got {self.gap} and {self.budget}")


class LenientVerifier(SequentialVerifier):
    """`SequentialVerifier` that takes the best drafted child where its regret is small, and where the row can still afford it."""

    def __init__(self, processors: NodeProcessors, noise: Noise | None, lenient: Lenient):
        super().__init__(processors, noise)
        self.lenient = lenient
        self.spent: Tensor | None = None  # (B,) regret so far

    def chosen_tokens(
        self, scores: Tensor, columns: list[int], alive: Tensor, draft: DraftTree, node: Tensor
    ) -> Tensor:
        best = super().chosen_tokens(scores, columns, alive, draft, node)
        values = scores if self.noise is None else scores.log_softmax(-1) - self.noise.at(columns).to(scores).log()
        children = draft.parents == node[:, None]
        drafted = values.gather(1, draft.tokens).masked_fill(~children, float("-inf")).max(-1)
        regret = values.gather(1, best[:, None])[:, 0] - drafted.values
        spent = torch.zeros_like(regret) if self.spent is None else self.spent
        taken = alive & regret.isfinite() & (regret <= self.lenient.gap) & (spent + regret <= self.lenient.budget)
        self.spent = spent + torch.where(taken, regret, 0)
        return torch.where(taken, draft.tokens.gather(1, drafted.indices[:, None])[:, 0], best)
