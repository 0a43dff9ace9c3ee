"""`TargetLogits`: how a target makes logits of its final state, for all tokens or for some.

Owns their arithmetic. Knows nothing of texts or heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.hidden_states import FINAL, Taps
from specdec.models.introspection import device_of
from specdec.training.teacher.unsharded import plain

NUMBERS_AT_ONCE = 2**25  # logits of the whole vocabulary in memory together


@dataclass(frozen=True)
class TargetLogits:
    """`cap * tanh(scale * (weight @ state + bias) / cap)`, what is None left out.

    Attributes:
        weight: (K, H). bias: (K,). scale: Cohere's and Granite's. cap: Gemma-2's.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def __call__(self, state: Tensor) -> Tensor:
        """(n, K) float32 of states (n, H)."""
        logits = (state.to(self.weight.dtype) @ self.weight.T).float()
        if self.bias is not None:
            logits = logits + self.bias.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def over_all(self, states: Tensor, learn: Tensor) -> Tensor:
        """What the logits of some tokens leave out of a distribution over the whole vocabulary.

        Args:
            states: (..., T, C), the final state last. learn: (..., T) bool.

        Returns:
            (..., T, 2) float32, on the states' device: the logits' log-sum-exp and the index of the highest, of each
            state that a token to learn was chosen from; 0 elsewhere.
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
        """To the tokens `rows` (K,)."""
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
        """Of a target, of all tokens or of `rows` (K,); found out, and checked, by running it on eight tokens."""
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
                f"{type(target).__name__} computes its logits in a way that is not known (more than a matrix, a bias, "
                "a scale and a cap): heads cannot be trained for it"
            )
        return whole if rows is None else whole.restricted(rows)

    @classmethod
    def _as_named(cls, target: PreTrainedModel) -> TargetLogits:
        """Of its LM head's weights and its config's cap; a copy of weights that lie elsewhere."""
        lm_head = plain(target.get_output_embeddings())
        with align_module_device(lm_head):  # what accelerate keeps elsewhere is here for so long
            weight, bias = lm_head.weight.detach(), getattr(lm_head, "bias", None)
            bias = None if bias is None else bias.detach()
        cap = getattr(target.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        return cls(weight, bias, cap=cap)
