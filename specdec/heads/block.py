"""`Block`: what one pass drafted for every row, and what follows from it behind the tokens chosen so far.

Knows nothing of where it comes from: a DFlash drafter, or a P-EAGLE head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.heads.markov import ConfidenceHead, MarkovHead


@dataclass(frozen=True)
class Block:
    """Logits for each place of a block, whatever was chosen before; with a Markov head, its bias comes on top.

    Attributes:
        logits: (B, D, K). hidden: (B, D, H) what they were made of; None where there are no further heads.
        markov, confidence: DSpark's heads.
        carried: (B, 1, r) what a recurrent Markov head comes to the anchor with. states: (B, 1 + M, r) what it goes on
            with from the anchor, and from each of the nodes so far. None: nothing.
        sure: (B, n) float32, of the newest nodes, how likely their next tokens are to be accepted; None: not known.
    """

    logits: Tensor
    hidden: Tensor | None = None
    markov: MarkovHead | None = None
    confidence: ConfidenceHead | None = None
    carried: Tensor | None = None
    states: Tensor | None = None
    sure: Tensor | None = None

    def behind(self, depth: int, tokens: Tensor, above: Tensor | None) -> tuple[Tensor, Block]:
        """Logits (B, n, K) behind n tokens, and the block that knows of them.

        Args:
            depth: tokens drafted up to there, these included: 0 behind the anchor. tokens: (B, n) int64.
            above: (B, n) int64, the nodes that they come behind; None: the last one, or the anchor.
        """
        n = tokens.shape[1]
        logits = self.logits[:, depth : depth + 1].expand(-1, n, -1)
        if self.hidden is None or (self.markov is None and self.confidence is None):
            return logits, self
        hidden = self.hidden[:, depth : depth + 1].expand(-1, n, -1)
        inputs, states = hidden, self.states
        if self.markov is not None:
            before = self.markov.embedded(tokens.to(hidden.device)).to(hidden.dtype)
            bias, state = self.markov(before, hidden, self._state(depth, above, n))
            logits = logits + bias
            if state is not None:
                states = state if depth == 0 or states is None else torch.cat([states, state], 1)
            inputs = torch.cat([hidden, before], -1)
        sure = None
        if self.confidence is not None:
            sure = self.confidence(inputs[..., : self.confidence.proj.in_features])
        return logits, replace(self, states=states, sure=sure)

    def _state(self, depth: int, above: Tensor | None, n: int) -> Tensor | None:
        """(B, n, r) that the recurrent head comes to n nodes with."""
        if depth == 0 or self.states is None:
            return self.carried
        if above is None:
            return self.states[:, -1:].expand(-1, n, -1)
        index = 1 + above.to(self.states.device)
        return self.states.gather(1, index[..., None].expand(-1, -1, self.states.shape[-1]))
