"""`Objective`: what a head is trained to do, as a module that gives the loss of a batch.

EAGLE-3's training-time test (2503.01840): at every step the head's distribution q over the draft vocabulary is drawn
towards the target's, p. What p gives to tokens that cannot be drafted is missing from its sum: where it is most of p,
little is learnt, and as little would be accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.choices import LossName, check_choice
from specdec.eagle3.head import Eagle3Head
from specdec.training.teacher import TargetLogits
from specdec.training.unroll import unroll

ROWS_AT_ONCE = 1024  # whose logits are in memory together


def cross_entropy(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """-sum(p log q) of each row (n,), and its gradient by the logits (n, K), which it overwrites."""
    norm, mass = logits.logsumexp(-1, keepdim=True), p.sum(-1, keepdim=True)
    loss = (mass * norm)[:, 0] - (p * logits).sum(-1)
    return loss, logits.sub_(norm).exp_().mul_(mass).sub_(p)


def likelihood_of_acceptance(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """-log of sum(min(p, q)), the chance that a drawn token is accepted (LK, 2602.23881); as `cross_entropy`."""
    q = logits.softmax(-1)
    below = q.where(q < p, 0)
    accepted = torch.minimum(p, q).sum(-1).clamp(min=1e-6)
    return -accepted.log(), q.mul_(below.sum(-1, keepdim=True)).sub_(below).div_(accepted[:, None])


LOSSES: dict[LossName, Any] = {"ce": cross_entropy, "lk": likelihood_of_acceptance}


class Objective(nn.Module):
    """The head, and what of the target its loss needs.

    Args:
        embedding: (V, H) of the target, frozen. target_logits: its logits of the draft vocabulary.
        steps: drafted tokens to train. decay: weight of a step's loss relative to the one before.
        loss: of `LOSSES`. flex: use flex attention, see `unroll`.

    Attributes:
        state_weight: of a second loss, EAGLE-1's (2401.15077): the distance of what the LM head reads from the target's
            own final state. It is meant for a young head; `Eagle3Trainer` fades it out.
    """

    def __init__(
        self,
        head: Eagle3Head,
        embedding: Tensor,
        target_logits: TargetLogits,
        *,
        steps: int = 5,
        decay: float = 0.8,
        loss: LossName = "ce",
        flex: bool = False,
    ):
        super().__init__()
        check_choice("loss", loss, LossName)
        self.loss = loss
        self.head, self.steps, self.decay, self.flex = head, steps, decay, flex
        self.state_weight = 0.0
        self._embedding = (embedding.detach(),)  # in a tuple: not saved, not moved, not trained
        self._target_logits = target_logits

    def forward(
        self, ids: Tensor, learn: Tensor, documents: Tensor, states: Tensor, over_all: Tensor
    ) -> dict[str, Any]:
        """Loss of a batch, as `StateDataset` and `collate` make it.

        Args:
            ids, documents: (B, T) int64. learn: (B, T) bool. states: (B, T, C) the taps' and the final state.
            over_all: (B, T, 2) float32 of the target's logits, see `TargetLogits.over_all`.

        Returns:
            loss: weighted mean over steps of the loss per learnt token.
            accuracy: (steps,) share of learnt tokens where the head's first choice is the target's, of all tokens.
        """
        head, T = self.head, ids.shape[1]
        embedding, target_logits = self._embedding[0].to(ids.device), self._target_logits.to(ids.device)
        H = target_logits.weight.shape[-1]
        taps, final = states[..., :-H].to(head.dtype), states[..., -H:]
        embeds = nn.functional.embedding(ids, embedding) if head.embed_tokens is None else head.embed_tokens(ids)
        learnt = learn.bool() & (torch.arange(T, device=ids.device) >= 2)  # the first that can be drafted
        drafted, counted = [], []
        steps = min(self.steps, T - 2)
        # Row i drafts token i + 2 + step.
        wanted = torch.stack([nn.functional.pad(learnt[:, 2 + step :], (0, 2 + step)) for step in range(steps)]).any(0)
        rows_of = unroll(head, embeds.to(head.dtype), taps, steps, documents, wanted=wanted, flex=self.flex)
        for first, h in enumerate(rows_of, start=2):
            drafted.append(nn.functional.pad(h[:, : T - first], (0, 0, first, 0))[learnt])
            same = documents[:, first:] == documents[:, : T - first]
            counted.append(nn.functional.pad(same, (first, 0))[learnt])
        weight = torch.tensor([self.decay**step for step in range(len(drafted))], device=ids.device)
        rows = torch.stack(counted)  # (steps, N) bool, of N learnt tokens
        # Another process may have longer rows, and so more steps.
        counts = nn.functional.pad(rows.sum(-1), (0, self.steps - len(rows)))
        scale = rows * (weight / weight.sum() / _over_processes(counts)[: len(rows)].clamp(min=1))[:, None]
        # The target chose a token from its state at the one before.
        before, over_all = final.roll(1, 1)[learnt], over_all.roll(1, 1)[learnt]
        choice = _places(over_all[:, 1].long(), head.draft_to_target)
        truth = Truth(before, over_all[:, 0], choice, target_logits)
        assert head.lm_head is not None
        out = head.read_out(torch.stack(drafted))
        loss, hits = _LossOfRows.apply(out, head.lm_head.weight, truth, scale, LOSSES[self.loss])
        if self.state_weight and out.shape[-1] == H:
            loss = loss + self.state_weight * (scale * _distance(out, before)).sum()
        return {"loss": loss, "accuracy": hits / rows.sum(-1).clamp(min=1)}


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


class _LossOfRows(torch.autograd.Function):
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
    ) -> tuple[Tensor, Tensor]:
        """drafted (steps, N, H), weight (K, H), truth of N rows, scale (steps, N), loss_of: of `LOSSES`.

        Returns the loss, and (steps,) in how many rows both have the same first choice.
        """
        kind = drafted.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else drafted.dtype
        drafted, half = drafted.to(dtype), weight.to(dtype)
        loss = torch.zeros((), device=drafted.device)
        hits = torch.zeros(len(drafted), device=drafted.device)
        to_drafted = torch.empty_like(drafted)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, drafted.shape[1], ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            p, choice = truth.p(part), truth.choice[part]
            for step, (h, each) in enumerate(zip(drafted[:, part], scale[:, part], strict=True)):
                logits = (h @ half.T).float()
                hits[step] += ((logits.argmax(-1) == choice) & (each > 0)).sum()
                of_rows, to_logits = loss_of(p, logits)
                loss += (each * of_rows).sum()
                to_logits = to_logits.mul_(each[:, None]).to(dtype)
                to_drafted[step, part] = to_logits @ half
                if to_weight is not None:
                    to_weight += to_logits.T @ h
        ctx.save_for_backward(to_drafted, to_weight)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        to_drafted, to_weight = ctx.saved_tensors
        return grads[0] * to_drafted, None if to_weight is None else grads[0] * to_weight, None, None, None


def _places(tokens: Tensor, among: Tensor) -> Tensor:
    """(N,) int64 index of each token (N,) among K others (K,); -1 where it is none of them."""
    ordered, order = among.sort()
    place = torch.searchsorted(ordered, tokens).clamp(max=len(among) - 1)
    return order[place].where(ordered[place] == tokens, -1)


def _distance(out: Tensor, wanted: Tensor) -> Tensor:
    """(..., N) squared, relative to the wanted states' own squared lengths."""
    wanted = wanted.float()
    return (out.float() - wanted).square().sum(-1) / wanted.square().sum(-1).clamp(min=1e-6)


def _over_processes(counts: Tensor) -> Tensor:
    """The mean over training processes: with it, the mean of their losses is the loss of all rows together."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return counts
    counts = counts.float()
    torch.distributed.all_reduce(counts)
    return counts / torch.distributed.get_world_size()
