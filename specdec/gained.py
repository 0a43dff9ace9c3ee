"""`Gained`: what a round brings each row, as the device has it while the host does not know yet.

A proposer that wants no more than this can draft on before the host has the verdict (`Proposer.draft_ahead`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Gained:
    """Of B rows, padded on the left to D.

    Attributes:
        tokens: (B, D) int64, accepted ones and the next. pads: (B,) int64, how many of the D are padding.
        states: (B, D, C), the target's at the tokens before each of them; None for a proposer without taps.
    """

    tokens: Tensor
    pads: Tensor
    states: Tensor | None

    def padded(self, width: int) -> Gained:
        """To a larger D."""
        more = width - self.tokens.shape[1]
        if not more:
            return self
        states = None if self.states is None else pad(self.states, (0, 0, more, 0))
        return Gained(pad(self.tokens, (more, 0)), self.pads + more, states)


def of_nodes(features: Tensor, nodes: Tensor) -> Tensor:
    """(B, W, C) of nodes (B, W) int64 of the draft, from features (B, N, C) of all of them."""
    return features.gather(1, nodes.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
