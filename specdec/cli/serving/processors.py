"""`Penalties`: OpenAI's frequency and presence penalties, as a logits processor."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Lowers the logits of tokens that the answer has already.

    The logit of a token that the answer has c times falls by c * frequency, and once by presence. The prompt does not
    count.

    Args:
        prompt_length: number of tokens before the answer.
        frequency: penalty for each time.
        presence: penalty for tokens that occur.

    Examples:
        >>> penalties = Penalties(1, frequency=0.5, presence=1.0)
        >>> penalties(torch.tensor([[2, 0, 0]]), torch.zeros(1, 3))  # the answer is 0, 0
        tensor([[-2.,  0.,  0.]])
    """

    stateless = True  # a row's result depends on its arguments only: may be called at any node of a draft

    def __init__(self, prompt_length: int, frequency: float = 0.0, presence: float = 0.0):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) after texts (B, T), lowered."""
        answer = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
