"""`Block`: logits that one pass of a block drafter computed, corrected for the tokens chosen so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from specdec.heads.markov import ConfidenceHead


class Correction(Protocol):
    """A head that corrects a block's logits for the tokens drafted so far: DSpark's, Domino's or DFlash 2's."""

    def embedded(self, before: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Embed tokens (B, n) int64. embed: maps them to the drafter's own inputs (B, n, H)."""

    def initial_state(self, before: Tensor, hidden: Tensor) -> Tensor | None:
        """Return the recurrent state (B, 1, r) with which a block begins whose anchor drafts nothing.

        before: (B, 1, r), the anchor from `embedded`. hidden: (B, 1, H), the block's hidden state there.
        """

    def corrected(
        self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor | None, depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Correct the logits after n tokens.

        Args:
            logits: (B, 1, K), from the block alone, the same for all n tokens.
            before: (B, n, r), the tokens from `embedded`.
            hidden: (B, n, H), the block's hidden state at the depth that is drafted.
            state: (B, n, r), recurrent state before these tokens. None: a block begins.
            depth: length of the draft up to and including these tokens, 0 for the anchor.

        Returns:
            The corrected logits (B, n or 1, K), and the recurrent state after these tokens. None if there is none.
        """


@dataclass(frozen=True)
class Block:
    """Logits for each depth of a draft, independent of the tokens chosen. A correction makes them depend on these.

    Attributes:
        logits: (B, D, K), one set per depth.
        hidden: (B, D, H), input of the LM head. None if there is neither a correction nor a confidence head.
        correction: head that corrects the logits, or None.
        confidence: DSpark's confidence head, or None.
        embed: the drafter's token embedding, see `Correction.embedded`. None if there is no correction.
        initial_state: (B, 1, r), see `Correction.initial_state`.
        states: (B, 1 + M, r), recurrent state after the anchor and after each of the M nodes so far, or None.
        acceptance: (B, n) float32, acceptance probability of the tokens after the newest nodes. None if unknown.
    """

    logits: Tensor
    hidden: Tensor | None = None
    correction: Correction | None = None
    confidence: ConfidenceHead | None = None
    embed: Callable[[Tensor], Tensor] | None = None
    initial_state: Tensor | None = None
    states: Tensor | None = None
    acceptance: Tensor | None = None

    def logits_after(self, depth: int, tokens: Tensor, above: Tensor | None) -> tuple[Tensor, Block]:
        """Compute the logits after n tokens of the draft.

        Args:
            depth: length of the draft up to and including these tokens, 0 for the anchor.
            tokens: (B, n) int64.
            above: (B, n) int64, index of each token's parent node. None for the last node, or the anchor.

        Returns:
            Logits (B, n, K), and the block updated with these tokens.
        """
        n = tokens.shape[1]
        logits = self.logits[:, depth : depth + 1]
        if self.hidden is None or (self.correction is None and self.confidence is None):
            return logits.expand(-1, n, -1), self
        hidden = self.hidden[:, depth : depth + 1].expand(-1, n, -1)
        inputs, states = hidden, self.states
        if self.correction is not None:
            assert self.embed is not None
            before = self.correction.embedded(tokens.to(hidden.device), self.embed).to(hidden.dtype)
            logits, state = self.correction.corrected(logits, before, hidden, self._state(depth, above, n), depth)
            if state is not None:
                states = state if depth == 0 or states is None else torch.cat([states, state], 1)
            inputs = torch.cat([hidden, before], -1)
        acceptance = None
        if self.confidence is not None:
            acceptance = self.confidence(inputs[..., : self.confidence.proj.in_features])
        return logits.expand(-1, n, -1), replace(self, states=states, acceptance=acceptance)

    def _state(self, depth: int, above: Tensor | None, n: int) -> Tensor | None:
        """Return the recurrent states (B, n, r) of the correction before n nodes."""
        if depth == 0 or self.states is None:
            return self.initial_state
        if above is None:
            return self.states[:, -1:].expand(-1, n, -1)
        index = 1 + above.to(self.states.device)
        return self.states.gather(1, index[..., None].expand(-1, -1, self.states.shape[-1]))


class BlockDrafts:
    """Base of the runners whose drafts are read from one `block`: those of DFlash and its kin, Medusa and P-EAGLE.

    Attributes:
        block: draft of the last pass.
    """

    block: Block

    def logits_after(self, depth: int, tokens: Tensor, above: Tensor | None) -> Tensor:
        """Return logits (B, n, K) after n tokens (B, n) at this depth of the draft, see `Block.logits_after`."""
        logits, self.block = self.block.logits_after(depth, tokens, above)
        return logits
