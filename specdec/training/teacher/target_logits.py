"""Logits of a target from its final states, over all tokens or some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.hidden_states import FINAL, Taps
from specdec.models.introspection import device_of
from specdec.training.teacher.unsharded import materialized

NUMBERS_AT_ONCE = 2**25  # logits over the whole vocabulary in memory at the same time


@dataclass(frozen=True)
class TargetLogits:
    """Function `cap * tanh(scale * (weight @ state + bias) / cap)`, without the parts that are None.

    Attributes:
        weight: (K, H), rows of the LM head.
        bias: (K,), bias of the LM head.
        scale: factor of the logits (Cohere, Granite).
        cap: soft cap of the logits (Gemma 2).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def __call__(self, state: Tensor) -> Tensor:
        """Compute the logits (n, K) float32 of states (n, H)."""
        logits = (state.to(self.weight.dtype) @ self.weight.T).float()
        if self.bias is not None:
            logits = logits + self.bias.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def over_all(self, states: Tensor, learn: Tensor) -> Tensor:
        """Summarise the logits over the whole vocabulary, from which only some tokens' logits are computed later.

        Args:
            states: (..., T, C), the final state last.
            learn: (..., T) bool, tokens to train on.

        Returns:
            (..., T, 2) float32, on the states' device: the log-sum-exp of the logits and the index of the highest, for
            each state that predicts a token to train on; 0 elsewhere.
        """
        whole, H = states.new_zeros(*states.shape[:-1], 2, dtype=torch.float32), self.weight.shape[-1]
        chosen_from = nn.functional.pad(learn.bool()[..., 1:], (0, 1)).to(states.device)
        final = states[..., -H:][chosen_from].to(self.weight.device)
        few = max(1, NUMBERS_AT_ONCE // len(self.weight))
        for where, part in zip(chosen_from.nonzero().split(few), final.split(few), strict=True):
            logits = self(part)
            found = torch.stack([logits.logsumexp(-1), logits.argmax(-1).float()], -1)
            whole[where.unbind(-1)] = found.to(whole.device)
        return whole

    def restricted(self, rows: Tensor) -> TargetLogits:
        """Return the logits restricted to the tokens `rows` (K,) int64."""
        rows = rows.to(self.weight.device)
        return replace(self, weight=self.weight[rows], bias=None if self.bias is None else self.bias[rows])

    def to(self, device: torch.device) -> TargetLogits:
        if self.weight.device == device:
            return self
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias)

    @classmethod
    @torch.no_grad()
    def of(cls, target: PreTrainedModel, rows: Tensor | None = None) -> TargetLogits:
        """Find the logits function of a target, and verify it by running the target on eight tokens.

        Args:
            target: model with an LM head.
            rows: (K,) int64, tokens to keep. None: all.

        Raises:
            ValueError: The target computes its logits differently.
        """
        whole = cls._as_named(target)
        cap, listener = whole.cap, Taps(target, [FINAL], whole.weight.device)
        ids = torch.arange(1, 9, device=device_of(target))[None] % whole.weight.shape[0]
        with listener.listening() as taken:
            theirs = target(input_ids=ids, use_cache=False).logits[0].float().to(whole.weight.device)
        state = listener.features(taken)[0]
        uncapped = theirs if cap is None else cap * torch.atanh((theirs / cap).clamp(-0.9999, 0.9999))
        linear = replace(whole, cap=None)(state)
        scale = float((linear * uncapped).sum() / linear.square().sum().clamp(min=1e-9))  # least squares
        whole = replace(whole, scale=1.0 if abs(scale - 1) < 0.02 else scale)
        if (whole(state) - theirs).abs().mean() > 0.05 * theirs.std():
            raise ValueError(
                f"{type(target).__name__} computes its logits in an unsupported form (more than a matrix, a bias, a "
                "scale and a cap): heads cannot be trained for it"
            )
        return whole if rows is None else whole.restricted(rows)

    @classmethod
    def _as_named(cls, target: PreTrainedModel) -> TargetLogits:
        """Read the LM head's weights and the config's cap. Offloaded or sharded weights are copied."""
        lm_head = materialized(target.get_output_embeddings())
        with align_module_device(lm_head):  # brings offloaded weights back for the duration of this block
            weight, bias = lm_head.weight.detach(), getattr(lm_head, "bias", None)
            bias = None if bias is None else bias.detach()
        cap = getattr(target.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        return cls(weight, bias, cap=cap)
