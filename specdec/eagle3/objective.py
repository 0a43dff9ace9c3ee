"""`Objective`: what a head is trained to do, as a module that gives the loss of a batch.

EAGLE-3's training-time test (2503.01840): at every step the head's distribution over the draft vocabulary is drawn
towards the target's, restricted to that vocabulary and renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specdec.eagle3.head import Eagle3Head
from specdec.eagle3.unroll import unroll

ROWS_AT_ONCE = 1024  # whose logits are in memory together


class Objective(nn.Module):
    """The head, and what of the target its loss needs: the embedding, and the LM head's rows of draft tokens.

    Args:
        embedding: (V, H) of the target, frozen. lm_head: (V, H) of the target.
        steps: drafted tokens to train. decay: weight of a step's loss relative to the one before.
    """

    def __init__(self, head: Eagle3Head, embedding: Tensor, lm_head: Tensor, *, steps: int = 5, decay: float = 0.8):
        super().__init__()
        self.head, self.steps, self.decay = head, steps, decay
        self._frozen = {"embedding": embedding.detach(), "lm_head": lm_head.detach()[head.draft_to_target.cpu()]}

    def forward(self, ids: Tensor, learn: Tensor, documents: Tensor, states: Tensor) -> dict[str, Any]:
        """Loss of a batch, as `StateDataset` and `collate` make it.

        Args:
            ids, documents: (B, T) int64. learn: (B, T) bool. states: (B, T, C) the taps' and the final state.

        Returns:
            loss: weighted mean over steps of the cross-entropy per learnt token.
            accuracy: (steps,) share of learnt tokens where the head's first choice is the target's.
        """
        head = self.head
        embedding, lm_head = (self._frozen[name].to(ids.device) for name in ("embedding", "lm_head"))
        H = lm_head.shape[-1]
        states = states.to(head.dtype)
        taps, final = states[..., :-H], states[..., -H:]
        embeds = nn.functional.embedding(ids, embedding) if head.embed_tokens is None else head.embed_tokens(ids)
        embeds = embeds.to(head.dtype)
        losses, right = [], []
        for step, h in enumerate(unroll(head, embeds, taps, self.steps, documents)):
            rows = ids.shape[1] - 2 - step
            if rows < 1:
                break
            # Row i drafts token i + 2 + step; the target chose it from its state at the token before.
            drafted = slice(2 + step, None)
            same = documents[:, drafted] == documents[:, :rows]
            mask = learn[:, drafted].bool() & same  # (B, rows)
            before = final[:, 1 + step : -1]
            loss, hits = self._compare(h[:, :rows][mask], before[mask], lm_head)
            losses.append(self.decay**step * loss)
            right.append(hits)
        weight = sum(self.decay**step for step in range(len(losses)))
        return {"loss": torch.stack(losses).sum() / weight, "accuracy": torch.stack(right)}

    def _compare(self, h: Tensor, final: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of n rows, and the share of agreeing first choices; logits of few rows at a time."""
        if len(h) == 0:
            return h.sum() * 0, h.new_zeros(())
        total, hits = h.new_zeros((), dtype=torch.float32), h.new_zeros((), dtype=torch.float32)
        for start in range(0, len(h), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            loss, agreed = checkpoint(self._entropy, h[part], final[part], lm_head, use_reentrant=False)
            total, hits = total + loss, hits + agreed
        return total / len(h), hits / len(h)

    def _entropy(self, h: Tensor, final: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = (final.to(lm_head.dtype) @ lm_head.T).float()
        drafted = self.head.logits(h).float()
        loss = -(wanted.softmax(-1) * drafted.log_softmax(-1)).sum()
        return loss, (wanted.argmax(-1) == drafted.argmax(-1)).sum().float()


def frequent_tokens(texts: Sequence[tuple[Tensor, Tensor]], vocab_size: int, size: int) -> tuple[Tensor, float]:
    """The draft vocabulary: the `size` tokens that the target writes most often.

    Args:
        texts: ids and learn flags, (T,) each.

    Returns:
        ids (size,) int64 ascending, and the share of the written tokens that they are.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids, learn in texts:
        counts += torch.bincount(ids[learn.bool()], minlength=vocab_size)
    best = counts.topk(size).indices.sort().values
    return best, float(counts[best].sum() / counts.sum().clamp(min=1))
