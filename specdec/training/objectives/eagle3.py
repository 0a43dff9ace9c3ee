"""`Objective`: what a head is trained to do, as a module that gives the loss of a batch.

At every step of its drafts the head's distribution q over the draft vocabulary is drawn towards the target's, p. What p
gives to tokens that cannot be drafted is missing from its sum: where it is most of p, little is learnt, and as little
would be accepted. Which drafts these are follows from the head's kind: EAGLE-3's training-time test (2503.01840) stands
here, that of drafters of blocks in `block_objective`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.heads.eagle3.head import Eagle3Head
from specdec.training.objectives.losses import LOSSES, LossOfRows, Truth, places
from specdec.training.objectives.unroll import unroll
from specdec.training.teacher.target_logits import TargetLogits
from specdec.utils.choices import LossName, check_choice

LONG = 256  # tokens of a row that is worth a pass of its own on a CPU


@dataclass(frozen=True)
class Drafted:
    """One step's drafts, before all logits are made of them.

    Attributes:
        read: (B, n, W), row i drafts token i + 2 + step.
        sure: (B, n), how likely the head takes its draft to be accepted; None: it does not say.
    """

    read: Tensor
    sure: Tensor | None = None


class Objective(nn.Module):
    """The head, and what of the target its loss needs.

    Args:
        embedding: (V, H) of the target, frozen. target_logits: its logits of the draft vocabulary.
        steps: drafted tokens to train. decay: weight of a step's loss relative to the one before.
        loss: of `LOSSES`.

    Attributes:
        update: which one of the training it is. state_weight: of a second loss, EAGLE-1's (2401.15077): the distance of
            what the LM head reads from the target's own final state. It is meant for a young head; `HeadTrainer` fades
            it out.
    """

    head: Any

    def __init__(
        self,
        head: nn.Module,
        embedding: Tensor,
        target_logits: TargetLogits,
        *,
        steps: int = 5,
        decay: float = 0.8,
        loss: LossName = "ce",
    ):
        super().__init__()
        check_choice("loss", loss, LossName)
        self.head, self.steps, self.decay, self.loss = head, steps, decay, loss
        self.state_weight, self.update = 0.0, 0
        self._embedding = (embedding.detach(),)  # in a tuple: not saved, not moved, not trained
        self._target_logits = target_logits

    # What differs by the head's kind

    @abstractmethod
    def drafts(self, ids: Tensor, learn: Tensor, documents: Tensor) -> Tensor:
        """(steps, B, T) bool: which tokens each step drafts and learns from. Arguments as `forward`'s."""

    @abstractmethod
    def _unrolled(self, ids: Tensor, learn: Tensor, documents: Tensor, taps: Tensor, steps: int) -> Iterator[Drafted]:
        """The drafts of each step.

        Args:
            ids, documents: (B, T) int64. learn: (B, T) bool. taps: (B, T, taps * target H).
        """

    @abstractmethod
    def _weight(self) -> Tensor:
        """(K, W), with which what is read becomes logits."""

    def _embed(self, tokens: Tensor) -> Tensor:
        """(B, n, H) of tokens (B, n)."""
        if self.head.embed_tokens is not None:
            return self.head.embed_tokens(tokens)
        return nn.functional.embedding(tokens, self._embedding[0].to(tokens.device)).to(self.head.dtype)

    # The loss

    def forward(
        self,
        ids: Tensor,
        learn: Tensor,
        documents: Tensor,
        states: Tensor,
        over_all: Tensor,
        counts: Tensor | None = None,
    ) -> dict[str, Any]:
        """Loss of a batch, as `StateDataset` and `collate` make it.

        Args:
            ids, documents: (B, T) int64. learn: (B, T) bool. states: (B, T, C) the taps' and the final state.
            over_all: (B, T, 2) float32 of the target's logits, see `TargetLogits.over_all`.
            counts: (steps,) of drafts in all batches of which this is a part; None: it is all of them.

        Returns:
            loss: weighted mean over steps of the loss per learnt token; of a part its share of the whole's, so that
                they add up.
            accuracy: (steps,) share of learnt tokens where the head's first choice is the target's, of all tokens.
        """
        head, T = self.head, ids.shape[1]
        target_logits = self._target_logits.to(ids.device)
        H = target_logits.weight.shape[-1]
        taps, final = states[..., :-H].to(head.dtype), states[..., -H:]
        is_learned = learn.bool() & (torch.arange(T, device=ids.device) >= 2)  # the first that can be drafted
        read, sure = [], []
        for first, step in enumerate(
            self._unrolled(ids, learn.bool(), documents, taps, min(self.steps, T - 2)), start=2
        ):
            read.append(nn.functional.pad(step.read[:, : T - first], (0, 0, first, 0))[is_learned])
            if step.sure is not None:
                sure.append(nn.functional.pad(step.sure[:, : T - first], (first, 0))[is_learned])
        rows = self.drafts(ids, learn, documents)[:, is_learned]  # (steps, N) bool, of N learnt tokens
        counts = rows.sum(-1) if counts is None else counts
        weight = self.decay ** torch.arange(self.steps, device=ids.device) * (counts > 0)
        scale = (rows * (weight / weight.sum().clamp(min=1e-9) / counts.clamp(min=1))[:, None])[: len(read)]
        # The target chose a token from its state at the one before.
        before, over_all = final.roll(1, 1)[is_learned], over_all.roll(1, 1)[is_learned]
        choice = places(over_all[:, 1].long(), head.draft_to_target)
        truth = Truth(before, over_all[:, 0], choice, target_logits)
        out = torch.stack(read)
        loss, hits, accepted = LossOfRows.apply(out, self._weight(), truth, scale, LOSSES[self.loss])
        if self.state_weight and out.shape[-1] == H:
            loss = loss + self.state_weight * (scale * _distance(out, before)).sum()
        if sure:
            # A chance that is summed over many tokens may come out a rounding error above 1.
            missed = nn.functional.binary_cross_entropy(torch.stack(sure), accepted.clamp(max=1), reduction="none")
            loss = loss + (scale * missed).sum()
        return {"loss": loss, "accuracy": hits.sum(-1) / rows[: len(read)].sum(-1).clamp(min=1)}


class Eagle3Objective(Objective):
    """EAGLE-3's: each step is fed what the head put out at the one before.

    Args:
        flex: use flex attention, see `unroll`.
    """

    head: Eagle3Head

    def __init__(self, *args: Any, flex: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.flex = flex

    def drafts(self, ids: Tensor, learn: Tensor, documents: Tensor) -> Tensor:
        return behind_every_token(self.steps, ids, learn, documents)

    def _unrolled(self, ids: Tensor, learn: Tensor, documents: Tensor, taps: Tensor, steps: int) -> Iterator[Drafted]:
        T = ids.shape[1]
        # Row i drafts token i + 2 + step.
        wanted = torch.stack([nn.functional.pad(learn[:, 2 + step :], (0, 2 + step)) for step in range(steps)]).any(0)
        # Rows want unlike numbers of drafts, and those of a pass are filled up to the most: on CPUs long ones go alone.
        at_once = max(1, LONG // T) if ids.device.type == "cpu" else len(ids)
        batch = (given.split(at_once) for given in (self._embed(ids), taps, documents, wanted))
        each = [
            unroll(self.head, embeds, states, steps, texts, wanted=drafts, flex=self.flex)
            for embeds, states, texts, drafts in zip(*batch, strict=True)
        ]
        for first, rows in enumerate(zip(*each, strict=True), start=2):
            yield Drafted(self.head.read_out(torch.cat(rows)[:, : T - first]))

    def _weight(self) -> Tensor:
        assert self.head.lm_head is not None
        return self.head.lm_head.weight


def behind_every_token(steps: int, ids: Tensor, learn: Tensor, documents: Tensor) -> Tensor:
    """`Objective.drafts` of heads that draft behind every token."""
    found = learn.new_zeros(steps, *learn.shape, dtype=torch.bool)
    for step, first in enumerate(range(2, min(steps + 2, ids.shape[1]))):
        found[step, :, first:] = learn[:, first:].bool() & (documents[:, first:] == documents[:, :-first])
    return found


def _distance(out: Tensor, wanted: Tensor) -> Tensor:
    """(..., N) squared, relative to the wanted states' own squared lengths."""
    wanted = wanted.float()
    return (out.float() - wanted).square().sum(-1) / wanted.square().sum(-1).clamp(min=1e-6)
