"""Base class of the training objectives, and EAGLE-3's objective, its training-time test (2503.01840).

An objective is a module that returns the loss of a batch. At every draft step it moves the head's distribution q over
the draft vocabulary towards the target's p. The sum of p excludes tokens that cannot be drafted: a position whose
probability is mostly outside the draft vocabulary weighs little, just as few of its drafts would be accepted.
Each kind of head decides which tokens are drafted; the other kinds are in `dflash.py` and `mtp.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specdec.heads.eagle3.head import Eagle3Head
from specdec.training.objectives.losses import LOSSES, LossOfRows, TargetProbabilities, acceptance, indices_in
from specdec.training.objectives.step_weights import weights_by_acceptance
from specdec.training.objectives.unroll import Drafted, unroll
from specdec.training.teacher.target_logits import TargetLogits
from specdec.utils.choices import LossName, check_choice

LONG = 256  # tokens from which a row gets a pass of its own on a CPU


class Objective(nn.Module):
    """Loss of a head, with the parts of the target that it needs.

    Args:
        head: head to train.
        embedding: (V, H), the target's embedding, frozen.
        target_logits: the target's logits over the draft vocabulary.
        steps: drafted tokens to train.
        decay: weight of a step's loss relative to the step before.
        loss: name of a loss in `LOSSES`.

    Attributes:
        update: number of the current update.
        state_weight: weight of an additional loss from EAGLE-1 (2401.15077): the distance of the LM head's input from
            the target's final state. It helps a fresh head; `HeadTrainer` reduces it to 0.
        by_acceptance: True to weight steps by `weights_by_acceptance` instead of `decay`. Such losses are not
            comparable with each other, because the weights change with the head.
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
        self.state_weight, self.update, self.by_acceptance = 0.0, 0, False
        self._embedding = (embedding.detach(),)  # in a tuple: not saved, not moved, not trained
        self._target_logits = target_logits

    def drafts(self, ids: Tensor, learn: Tensor, documents: Tensor) -> Tensor:
        """Select the tokens that each step drafts and is trained on, (steps, B, T) bool. Arguments: see `forward`."""
        found = learn.new_zeros(self.steps, *learn.shape, dtype=torch.bool)
        for step, first in enumerate(range(2, min(self.steps + 2, ids.shape[1]))):
            found[step, :, first:] = learn[:, first:].bool() & (documents[:, first:] == documents[:, :-first])
        return found

    @abstractmethod
    def _unrolled(self, ids: Tensor, learn: Tensor, documents: Tensor, taps: Tensor, steps: int) -> Iterator[Drafted]:
        """Yield the drafts of each step. taps: (B, T, taps * target H). Other arguments: see `forward`."""

    @abstractmethod
    def _weight(self) -> Tensor:
        """Return the matrix (K, W) that maps `Drafted.hidden` to logits."""

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens (B, n) as (B, n, H)."""
        if self.head.embed_tokens is not None:
            return self.head.embed_tokens(tokens)
        return nn.functional.embedding(tokens, self._embedding[0].to(tokens.device)).to(self.head.dtype)

    def forward(
        self,
        ids: Tensor,
        learn: Tensor,
        documents: Tensor,
        states: Tensor,
        over_all: Tensor,
        counts: Tensor | None = None,
    ) -> dict[str, Any]:
        """Compute the loss of a batch, as `StateDataset` and `collate` make it.

        Args:
            ids: (B, T) int64, token ids.
            learn: (B, T) bool, True for tokens to train on.
            documents: (B, T) int64, text number of each token. Texts packed in one row do not see each other.
            states: (B, T, C), the taps' states, then the final state.
            over_all: (B, T, 2) float32, summary of the target's logits, see `TargetLogits.over_all`.
            counts: (steps,), number of drafts in all batches that this one is a part of. None: this batch is all.

        Returns:
            A dictionary of
                loss: weighted mean over steps of the loss per token. For a part of a larger batch it is the part's
                    share, so that the parts add up.
                accuracy: (steps,), fraction of tokens where the head's first choice is the target's first choice among
                    all tokens.
        """
        head, T = self.head, ids.shape[1]
        target_logits = self._target_logits.to(ids.device)
        H = target_logits.weight.shape[-1]
        taps, final = states[..., :-H].to(head.dtype), states[..., -H:]
        is_learned = learn.bool() & (torch.arange(T, device=ids.device) >= 2)  # token 2 is the first that is drafted
        hidden, confidence = [], []
        drafted = self._unrolled(ids, learn.bool(), documents, taps, min(self.steps, T - 2))
        for first, step in enumerate(drafted, start=2):
            hidden.append(nn.functional.pad(step.hidden[:, : T - first], (0, 0, first, 0))[is_learned])
            if step.acceptance is not None:
                confidence.append(nn.functional.pad(step.acceptance[:, : T - first], (first, 0))[is_learned])
        drafts = self.drafts(ids, learn, documents)  # (steps, B, T) bool
        counts = drafts.sum((1, 2)) if counts is None else counts
        drafts = drafts[: len(hidden)]
        rows = drafts[:, is_learned]  # (steps, N) bool, for N tokens to train on
        weight = self.decay ** torch.arange(self.steps, device=ids.device) * (counts > 0)
        scale = rows * (weight / weight.sum().clamp(min=1e-9) / counts.clamp(min=1))[: len(hidden), None]
        # The target predicts a token from its state at the previous one.
        before, over_all = final.roll(1, 1)[is_learned], over_all.roll(1, 1)[is_learned]
        choice = indices_in(over_all[:, 1].long(), head.draft_to_target)
        truth = TargetProbabilities(before, over_all[:, 0], choice, target_logits)
        out = torch.stack(hidden)
        if self.by_acceptance:
            accepted = torch.zeros(drafts.shape, device=ids.device)
            accepted[:, is_learned] = acceptance(out, self._weight(), truth, rows)
            scale = weights_by_acceptance(accepted, drafts)[:, is_learned] / counts.max().clamp(min=1)
        loss, hits, accepted = LossOfRows.apply(out, self._weight(), truth, scale, LOSSES[self.loss])
        if self.state_weight and out.shape[-1] == H:
            loss = loss + self.state_weight * (scale * _distance(out, before)).sum()
        if confidence:
            # A probability summed over many tokens may exceed 1 by a rounding error.
            true = accepted.clamp(max=1)
            with torch.autocast(out.device.type, enabled=False):  # which refuses this loss on CUDA
                missed = nn.functional.binary_cross_entropy(torch.stack(confidence).float(), true, reduction="none")
            loss = loss + (scale * missed).sum()
        return {"loss": loss, "accuracy": hits.sum(-1) / rows.sum(-1).clamp(min=1)}


class Eagle3Objective(Objective):
    """EAGLE-3's objective: the input of each step is the head's output at the step before.

    Takes the arguments of `Objective`, and:

    Args:
        flex: use flex attention, see `unroll`.
    """

    head: Eagle3Head

    def __init__(self, *args: Any, flex: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.flex = flex

    def _unrolled(self, ids: Tensor, learn: Tensor, documents: Tensor, taps: Tensor, steps: int) -> Iterator[Drafted]:
        T = ids.shape[1]
        # Row i drafts token i + 2 + step.
        wanted = torch.stack([nn.functional.pad(learn[:, 2 + step :], (0, 2 + step)) for step in range(steps)]).any(0)
        # Rows with fewer drafts are filled up to the longest in a pass, so on CPUs long rows get their own passes.
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


def _distance(out: Tensor, wanted: Tensor) -> Tensor:
    """Squared distance (..., N), relative to the squared lengths of the wanted states."""
    wanted = wanted.float()
    return (out.float() - wanted).square().sum(-1) / wanted.square().sum(-1).clamp(min=1e-6)
