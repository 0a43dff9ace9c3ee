"""Losses between a head's distribution q and the target's p, with their gradients, in chunks of rows.

Gradients are computed together with the loss, so that no logits are kept: the logits of all rows would be the largest
tensor of a training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.training.teacher.target_logits import TargetLogits
from specdec.utils.choices import LossName

ROWS_AT_ONCE = 1024  # rows whose logits are in memory at the same time


def cross_entropy(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy -sum(p log q) of each row.

    Args:
        p: (n, K) float32, the target's probabilities.
        logits: (n, K) float32, the head's logits. They are overwritten.

    Returns:
        The loss (n,), its gradient with respect to the logits (n, K), and sum(min(p, q)) (n,), the probability that a
        sampled token is accepted.
    """
    norm, mass = logits.logsumexp(-1, keepdim=True), p.sum(-1, keepdim=True)
    loss = (mass * norm)[:, 0] - (p * logits).sum(-1)
    q = logits.sub_(norm).exp_()
    accepted = torch.minimum(p, q).sum(-1)
    return loss, q.mul_(mass).sub_(p), accepted


def likelihood_of_acceptance(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Likelihood loss -log(sum(min(p, q))) (LK, 2602.23881). Arguments and returns: see `cross_entropy`."""
    q = logits.softmax(-1)
    below = q.where(q < p, 0)
    accepted = torch.minimum(p, q).sum(-1)
    some = accepted.clamp(min=1e-6)
    return -some.log(), q.mul_(below.sum(-1, keepdim=True)).sub_(below).div_(some[:, None]), accepted


def half_of_each(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of `cross_entropy` and `likelihood_of_acceptance`. Arguments and returns: see `cross_entropy`."""
    likelihood, by_likelihood, accepted = likelihood_of_acceptance(p, logits)
    entropy, by_entropy, _ = cross_entropy(p, logits)
    return (likelihood + entropy) / 2, by_likelihood.add_(by_entropy).mul_(0.5), accepted


def total_variation(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """DSpark's loss: 0.9 sum|p - q| over all tokens plus 0.1 times the cross-entropy.

    The cross-entropy moves q where p and q hardly overlap. Arguments and returns: see `cross_entropy`.
    """
    q = logits.softmax(-1)
    below = q.where(q < p, 0)
    entropy, to_logits, accepted = cross_entropy(p, logits)
    to_distance = q.mul_(below.sum(-1, keepdim=True)).sub_(below).mul_(2)  # sum|p - q| = 2 - 2 sum(min(p, q))
    return 1.8 * (1 - accepted) + 0.1 * entropy, to_logits.mul_(0.1).add_(to_distance, alpha=0.9), accepted


LOSSES: dict[LossName, Any] = {
    "ce": cross_entropy,
    "lk": likelihood_of_acceptance,
    "ce+lk": half_of_each,
    "tv": total_variation,
}


@dataclass(frozen=True)
class TargetProbabilities:
    """The target's distributions of N tokens.

    Attributes:
        final: (N, H), the target's final states that predict the tokens.
        norm: (N,), the log-sum-exp of its logits over all tokens.
        choice: (N,) int64, index of its first choice in the draft vocabulary; -1 if it is outside.
        logits: maps states to logits over the draft vocabulary.
    """

    final: Tensor
    norm: Tensor
    choice: Tensor
    logits: TargetLogits

    def p(self, part: slice) -> Tensor:
        """Return the probabilities (n, K) of some rows. They sum to 1 minus that of tokens that cannot be drafted."""
        with torch.autocast(self.final.device.type, enabled=False):  # `norm` was computed without it
            return (self.logits(self.final[part]) - self.norm[part, None]).exp_()


class LossOfRows(torch.autograd.Function):
    """Sum of scale * loss over all rows and steps.

    Gradients are computed in the forward pass. No logits are kept or computed twice, and the target's are computed once
    for all steps that draft the same token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        drafted: Tensor,
        weight: Tensor,
        truth: TargetProbabilities,
        scale: Tensor,
        loss_of: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss of N rows.

        Args:
            ctx: autograd context.
            drafted: (steps, N, W), input of the LM head.
            weight: (K, W), matrix of the logits.
            truth: the target's distributions of the N tokens.
            scale: (steps, N), weight of each loss. Rows with scale 0 are skipped.
            loss_of: a loss in `LOSSES`.

        Returns:
            The loss (); (steps, N) bool, True where both first choices are the same; and (steps, N), the probability
            of acceptance.
        """
        dtype = _number_format(drafted)
        drafted, half = drafted.to(dtype), weight.to(dtype)
        loss = torch.zeros((), device=drafted.device)
        hits = torch.zeros_like(scale, dtype=torch.bool)
        accepted = torch.zeros_like(scale)
        to_drafted = torch.zeros_like(drafted)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for step, rows, p, h in _in_parts(drafted, truth, scale != 0):
            each, logits = scale[step, rows], (h @ half.T).float()
            hits[step, rows] = logits.argmax(-1) == truth.choice[rows]
            of_rows, to_logits, accepted[step, rows] = loss_of(p, logits)
            loss += (each * of_rows).sum()
            to_logits = to_logits.mul_(each[:, None]).to(dtype)
            to_drafted[step, rows] = to_logits @ half
            if to_weight is not None:
                to_weight += to_logits.T @ h
        ctx.save_for_backward(to_drafted, to_weight)
        ctx.mark_non_differentiable(hits, accepted)
        return loss, hits, accepted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        to_drafted, to_weight = ctx.saved_tensors
        return grads[0] * to_drafted, None if to_weight is None else grads[0] * to_weight, None, None, None


@torch.no_grad()
def acceptance(drafted: Tensor, weight: Tensor, truth: TargetProbabilities, used: Tensor) -> Tensor:
    """Probability sum(min(p, q)) that each drafted token is accepted.

    Args:
        drafted: (steps, N, W), input of the LM head.
        weight: (K, W), matrix of the logits.
        truth: the target's distributions of the N tokens.
        used: (steps, N) bool, drafts to compute.

    Returns:
        (steps, N) float32, 0 where `used` is False.
    """
    dtype = _number_format(drafted)
    drafted, half = drafted.to(dtype), weight.to(dtype)
    found = torch.zeros(used.shape, device=drafted.device)
    for step, rows, p, h in _in_parts(drafted, truth, used):
        found[step, rows] = torch.minimum(p, (h @ half.T).float().softmax(-1)).sum(-1)
    return found


def _number_format(drafted: Tensor) -> torch.dtype:
    kind = drafted.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else drafted.dtype


def _in_parts(
    drafted: Tensor, truth: TargetProbabilities, used: Tensor
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield a step, some of its used rows (n,), their p (n, K) in float32 and input of the LM head (n, W)."""
    for start in range(0, drafted.shape[1], ROWS_AT_ONCE):
        whole = truth.p(slice(start, start + ROWS_AT_ONCE))
        for step, each in enumerate(used[:, start : start + ROWS_AT_ONCE]):
            chosen = each.nonzero()[:, 0]
            rows = start + chosen
            p = whole if len(chosen) == len(whole) else whole[chosen]
            yield step, rows, p, drafted[step, rows]


def indices_in(tokens: Tensor, among: Tensor) -> Tensor:
    """Return the index of each token (N,) in `among` (K,), as (N,) int64; -1 where it is not in there."""
    ordered, order = among.sort()
    place = torch.searchsorted(ordered, tokens).clamp(max=len(among) - 1)
    return order[place].where(ordered[place] == tokens, -1)
