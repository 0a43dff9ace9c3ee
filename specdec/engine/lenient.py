"""`Lenient`: a lossy rule with a bound on its loss, which accepts drafts hardly worse than the target's choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.sequential_verifier import SequentialVerifier
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise


@dataclass(frozen=True)
class Lenient:
    """LOSSY acceptance rule: accept a drafted token if the target's own choice is hardly better.

    The *regret* of a drafted token is the processed score of the target's choice minus its own. Scores are log p up to
    a constant; at T > 0 the log of the sampling noise is subtracted from both. A token is accepted if its regret is at
    most `gap` and the regrets accepted so far in this row, its own included, sum to at most `budget`. For greedy
    decoding the rule is from https://github.com/huggingface/transformers/issues/48636.

    Args:
        gap: largest regret of a token, in nats.
        budget: largest sum of regrets of a row in one call, in nats.

    Raises:
        ValueError: `gap` or `budget` is negative or NaN.

    Examples:
        >>> Lenient(gap=0.3, budget=5.0)
        Lenient(gap=0.3, budget=5.0)

        Pass it as a rule: `SpeculativeGenerator(model, "ngram", rule=Lenient(gap=0.3, budget=5.0))`.
    """

    gap: float = 0.5
    budget: float = float("inf")

    def __post_init__(self) -> None:
        if not self.gap >= 0 or not self.budget >= 0:
            raise ValueError(f"gap and budget must be at least 0, got {self.gap} and {self.budget}")


class LenientVerifier(SequentialVerifier):
    """`SequentialVerifier` that prefers the best drafted child while its regret is within `gap` and `budget`."""

    def __init__(self, processors: NodeProcessors, noise: Noise | None, lenient: Lenient):
        super().__init__(processors, noise)
        self.lenient = lenient
        self.spent: Tensor | None = None  # (B,) sum of accepted regrets; None before the first token

    def chosen_tokens(
        self, scores: Tensor, columns: list[int], alive: Tensor, draft: DraftTree, node: Tensor
    ) -> Tensor:
        best = super().chosen_tokens(scores, columns, alive, draft, node)
        size, values = scores.shape[1], scores  # a processor may have dropped the last tokens
        if self.noise is not None:
            values = scores.log_softmax(-1) - self.noise.at(columns).to(scores)[:, :size].log()
        children = (draft.parents == node[:, None]) & (draft.tokens < size)
        drafted = values.gather(1, draft.tokens.clamp(max=size - 1)).masked_fill(~children, float("-inf")).max(-1)
        regret = values.gather(1, best[:, None])[:, 0] - drafted.values
        spent = torch.zeros_like(regret) if self.spent is None else self.spent
        taken = alive & regret.isfinite() & (regret <= self.lenient.gap) & (spent + regret <= self.lenient.budget)
        self.spent = spent + torch.where(taken, regret, 0)
        return torch.where(taken, draft.tokens.gather(1, drafted.indices[:, None])[:, 0], best)
