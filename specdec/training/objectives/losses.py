"""Losses of a head's distribution q beside the target's p, with their gradients, over many rows without their logits.

Owns the losses by name. Their gradients are made on the way: logits of a whole vocabulary are the most that training
could keep, and none are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.training.teacher.target_logits import TargetLogits
from specdec.utils.choices import LossName

ROWS_AT_ONCE = 1024  # whose logits are in memory together


def cross_entropy(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-sum(p log q) of each row (n,), its gradient by the logits (n, K), which it overwrites, and sum(min(p, q)) (n,),
    the chance that a drawn token is accepted.
    """
    norm, mass = logits.logsumexp(-1, keepdim=True), p.sum(-1, keepdim=True)
    loss = (mass * norm)[:, 0] - (p * logits).sum(-1)
    q = logits.sub_(norm).exp_()
    accepted = torch.minimum(p, q).sum(-1)
    return loss, q.mul_(mass).sub_(p), accepted


def likelihood_of_acceptance(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-log of sum(min(p, q)) (LK, 2602.23881); as `cross_entropy`."""
    q = logits.softmax(-1)
    below = q.where(q < p, 0)
    accepted = torch.minimum(p, q).sum(-1)
    some = accepted.clamp(min=1e-6)
    return -some.log(), q.mul_(below.sum(-1, keepdim=True)).sub_(below).div_(some[:, None]), accepted


def half_of_each(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of both losses above; as `cross_entropy`."""
    likelihood, by_likelihood, accepted = likelihood_of_acceptance(p, logits)
    entropy, by_entropy, _ = cross_entropy(p, logits)
    return (likelihood + entropy) / 2, by_likelihood.add_(by_entropy).mul_(0.5), accepted


def total_variation(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """0.9 sum|p - q| over all tokens, and 0.1 of the cross-entropy, which moves q where they hardly meet: DSpark's; as
    `cross_entropy`.
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
class Truth:
    """What the target thinks of N tokens.

    Attributes:
        final: (N, H), the states it chose them from. norm: (N,), the log-sum-exp of its logits there.
        choice: (N,) int64, its first choice's index in the draft vocabulary; -1: not there.
        logits: its logits of the draft vocabulary.
    """

    final: Tensor
    norm: Tensor
    choice: Tensor
    logits: TargetLogits

    def p(self, part: slice) -> Tensor:
        """(n, K) of the rows of a part. Its sum is 1 less what other tokens are given."""
        return (self.logits(self.final[part]) - self.norm[part, None]).exp_()


class LossOfRows(torch.autograd.Function):
    """Sum of scale * loss. The gradients are computed on the way, so that no logits are kept or computed twice, and the
    target's only once for all steps that draft the same token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        drafted: Tensor,
        weight: Tensor,
        truth: Truth,
        scale: Tensor,
        loss_of: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """drafted (steps, N, W), weight (K, W), truth of N rows, scale (steps, N), loss_of: of `LOSSES`. Rows whose
        scale is 0 are left out.

        Returns the loss, and (steps, N) each: whether both have the same first choice, the chance to be accepted.
        """
        kind = drafted.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else drafted.dtype
        drafted, half = drafted.to(dtype), weight.to(dtype)
        loss = torch.zeros((), device=drafted.device)
        hits = torch.zeros_like(scale, dtype=torch.bool)
        accepted = torch.zeros_like(scale)
        to_drafted = torch.zeros_like(drafted)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, drafted.shape[1], ROWS_AT_ONCE):
            whole, choice = truth.p(slice(start, start + ROWS_AT_ONCE)), truth.choice[start : start + ROWS_AT_ONCE]
            for step, each in enumerate(scale[:, start : start + ROWS_AT_ONCE]):
                used = each.nonzero()[:, 0]
                p = whole if len(used) == len(whole) else whole[used]
                rows, each = start + used, each[used]
                h = drafted[step, rows]
                logits = (h @ half.T).float()
                hits[step, rows] = logits.argmax(-1) == choice[used]
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


def places(tokens: Tensor, among: Tensor) -> Tensor:
    """(N,) int64 index of each token (N,) among K others (K,); -1 where it is none of them."""
    ordered, order = among.sort()
    place = torch.searchsorted(ordered, tokens).clamp(max=len(among) - 1)
    return order[place].where(ordered[place] == tokens, -1)
