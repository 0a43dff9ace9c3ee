"""`Records`: the scores, logits and hidden states that a caller requested, in `generate()`'s format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.models.output import Output


@dataclass
class Records:
    """Outputs that the caller requested, per row and chosen token; None for those not requested.

    Attributes:
        scores: (V,) float32, processed.
        logits: (V,) float32, raw.
        hidden_states: one (H,) per layer.
        prompt_hidden_states: (B, T, H) per layer, from the prefill.
        wanted: True if more than the text is returned, the cache at least. Finished rows then continue with pad tokens
            as in plain decoding; otherwise they are no longer run.
    """

    scores: list[list[Tensor]] | None = None
    logits: list[list[Tensor]] | None = None
    hidden_states: list[list[tuple[Tensor, ...]]] | None = None
    prompt_hidden_states: tuple[Tensor, ...] | None = None
    wanted: bool = False
    _settled_scores: list[Tensor] = field(default_factory=list)

    def add(self, b: int, path: Sequence[int], output: Output, scores: Sequence[Tensor]) -> None:
        """Record row b's new tokens.

        Args:
            b: the row.
            path: indices of the nodes after which the tokens were chosen, in order.
            output: output of the target pass over these nodes.
            scores: processed scores (B, V), one per token.
        """
        for i, node in enumerate(path):
            if self.scores is not None:
                self.scores[b].append(scores[i][b].clone())
            if self.logits is not None:
                self.logits[b].append(output.logits[b, node].float())
            if self.hidden_states is not None and output.hidden_states is not None:
                self.hidden_states[b].append(tuple(states[b, node].clone() for states in output.hidden_states))

    def truncate(self, b: int, tokens: int) -> None:
        """Drop the records of row b after its first `tokens` tokens."""
        for kept in (self.scores, self.logits):
            if kept is not None:
                del kept[b][tokens:]
        if self.hidden_states is not None:
            del self.hidden_states[b][max(0, tokens - 1) :]

    def settle_scores(self, place: int) -> tuple[Tensor, ...] | None:
        """Settle new token `place` of all rows; the scores (B, V) so far, as stopping criteria get them."""
        if self.scores is None:
            return None
        rows = [row[place] for row in self.scores]
        size = min(map(len, rows))  # a processor dropped the tokens after it; rows written beside longer ones have -inf
        self._settled_scores.append(torch.stack([row[:size] for row in rows]))
        return tuple(self._settled_scores)

    def outputs(self, steps: int) -> dict[str, Any]:
        """Return `scores`, `logits` and `hidden_states` of the first `steps` new tokens, as `generate()` does."""
        logits, hidden = None, None
        if self.logits is not None:
            logits = tuple(torch.stack([row[t] for row in self.logits]) for t in range(steps))
        if self.hidden_states is not None and self.prompt_hidden_states is not None:
            later = []
            for t in range(steps - 1):
                layers = zip(*(row[t] for row in self.hidden_states), strict=True)  # per layer, B of (H,)
                later.append(tuple(torch.stack(states)[:, None] for states in layers))
            hidden = (self.prompt_hidden_states, *later)
        scores = tuple(self._settled_scores) if self.scores is not None else None
        return {"scores": scores, "logits": logits, "hidden_states": hidden}
