"""What is asked of the target beside its states: logits, for some tokens only; its embedding; which one it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.eagle3.runner import looked_up

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
        lm_head = target.get_output_embeddings()
        bias = getattr(lm_head, "bias", None)
        cap = getattr(target.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        whole = cls(lm_head.weight.detach(), None if bias is None else bias.detach(), 1.0, cap)

        ids = torch.arange(1, 9, device=target.device)[None] % whole.weight.shape[0]
        state = target.get_decoder()(input_ids=ids, use_cache=False)[0][0]
        theirs = target(input_ids=ids, use_cache=False).logits[0].float().to(whole.weight.device)
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


def embedding_of(target: PreTrainedModel, normed: bool = True) -> Tensor:
    """(V, H) as the target's embedding module gives it: Gemma's scales its rows.

    Args:
        normed: see `looked_up`.
    """
    module = target.get_input_embeddings()
    rows = torch.arange(module.weight.shape[0], device=module.weight.device)
    with torch.no_grad():
        return torch.cat([looked_up(module, part, normed) for part in rows.split(4096)])


def fingerprint(target: PreTrainedModel) -> str:
    """Tells apart models of one shape, by a few entries of each tensor."""
    content = hashlib.sha256()
    for tensor in target.state_dict().values():
        flat = tensor.flatten()
        content.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
    return content.hexdigest()[:16]
