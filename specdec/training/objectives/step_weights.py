"""Weights of a draft's steps in the loss, from how likely each is to be accepted: D-PACE (2605.18810)."""

from __future__ import annotations

import torch
from torch import Tensor

SMOOTHING = 0.5  # share of certainty in the probabilities, so that later steps of a fresh head have some weight


def weights_by_acceptance(accepted: Tensor, drafts: Tensor) -> Tensor:
    """Weight each draft by what its acceptance adds to the expected number of accepted tokens.

    With probabilities c of acceptance, c_0 + c_0 c_1 + c_0 c_1 c_2 + ... tokens of a draft are expected to be accepted.
    The derivative with respect to log(c_s) is the sum of the terms that contain c_s. So a step weighs little if it is
    hardly reached, or if hardly anything follows.

    Args:
        accepted: (steps, B, T), probability that token t is accepted when step s of a draft drafts it, which begins at
            token t - s. The paper takes the head's probability of the true token instead.
        drafts: (steps, B, T) bool, True for drafts to train. The others count as accepted.

    Returns:
        (steps, B, T) float32, 0 where `drafts` is False.

    Examples:
        >>> accepted = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])  # token 0 drafted at step 0, token 1 at step 1
        >>> drafts = torch.tensor([[[True, False]], [[False, True]]])
        >>> weights_by_acceptance(accepted, drafts).tolist()
        [[[1.5, 0.0]], [[0.0, 0.5]]]
    """
    chances = torch.where(drafts, SMOOTHING + (1 - SMOOTHING) * accepted, 1.0)
    expected = _by_start(chances).cumprod(0) * _by_start(drafts)
    return _by_start(expected.flip(0).cumsum(0).flip(0), back=True) * drafts


def _by_start(values: Tensor, *, back: bool = False) -> Tensor:
    """Move entry t of step s to t - s, the first token of its draft, or back. What wraps around is no draft."""
    sign = 1 if back else -1
    return torch.stack([step.roll(sign * s, -1) for s, step in enumerate(values)])
