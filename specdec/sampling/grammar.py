"""Grammars as logits processors whose state can be moved to any text: to any node of a draft, in any row.

A library's processor follows the one text that it is called with. Here each row has a `GrammarState`, which is rolled
back and advanced to the text in question. So drafts can be masked, and forced tokens are known before they are written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from specdec.utils.prefix import common_prefix


class GrammarState(ABC):
    """The position of one text in a grammar. Subclass it to use another grammar library, see `GrammarProcessor`.

    Example:
        ```python
        class Alternating(GrammarState):  # token 1, token 2, token 1, ...
            def __init__(self):
                self.length = 0

            def accept(self, token: int) -> bool:
                accepted = token == 1 + self.length % 2
                self.length += accepted
                return accepted

            def rollback(self, count: int) -> None:
                self.length -= count

            def allowed(self, vocab_size: int) -> Tensor:
                return torch.arange(vocab_size) == 1 + self.length % 2
        ```
    """

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Advance by one token, or return False if the grammar refuses it. After the end, any token is accepted."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""

    @abstractmethod
    def allowed(self, vocab_size: int) -> Tensor:
        """(V,) bool on the CPU: the tokens that may come next; after the end of the text its end tokens."""

    @property
    def ended(self) -> bool:
        """True once an end token was accepted, after which nothing is drafted."""
        return False

    def forced_text(self) -> bytes:
        """The text that must come next, as far as the grammar leaves no choice. Drafted if `vocabulary` is given."""
        return b""

    def vocabulary(self) -> Sequence[bytes] | None:
        """The bytes of each token, by token id; None if they are not known. Called once for a target."""
        return None


class GrammarProcessor(LogitsProcessor):
    """A grammar as a logits processor, for plain and for speculative decoding. Make one for each `generate()` call.

    specdec recognises the processors of xgrammar and outlines by itself. For another library, implement
    `GrammarState`. Batches and draft trees are supported, and where the grammar leaves no choice its tokens are
    drafted, next to any proposer.

    Args:
        states: called once with the batch size B; returns the states of B texts without new tokens.

    Example:
        ```python
        processor = GrammarProcessor(lambda batch_size: [Alternating() for _ in range(batch_size)])
        output = spec.generate(**inputs, max_new_tokens=8, logits_processor=[processor])
        ```
    """

    def __init__(self, states: Callable[[int], Sequence[GrammarState]]):
        self._states = states
        self._rows: GrammarRows | None = None

    @property
    def stateless(self) -> bool:
        """True if specdec may ask about any node of a draft, by `GrammarRows`; False if a subclass has its own call."""
        return type(self).__call__ is GrammarProcessor.__call__

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask scores (B, V) after texts (B, T), as plain decoding calls it: with the prompts first.

        Raises:
            ValueError: the grammar refuses a text, or there is not one state for each row.
        """
        if self._rows is None:
            self._rows = GrammarRows(self.states(len(input_ids)), input_ids.shape[1])
        return self._rows.masked(scores[:, None], [[text] for text in input_ids])[:, 0]

    def states(self, batch_size: int) -> Sequence[GrammarState]:
        """Make the states of B texts without new tokens.

        Raises:
            ValueError: there is not one for each row.
        """
        states = self._states(batch_size)
        if len(states) != batch_size:
            raise ValueError(
                f"GrammarProcessor got {len(states)} states for {batch_size} rows: its function takes the batch size "
                "and returns one state for each row"
            )
        return states


class GrammarRows:
    """The states of the rows of one call. `NodeProcessors` masks the scores of any node with them.

    Args:
        states: one for each of the B rows, before its first new token.
        start: the column of the first new token.
    """

    stateless = True

    def __init__(self, states: Sequence[GrammarState], start: int):
        self.states, self.start = states, start
        self._reached: list[list[int]] = [[] for _ in states]  # the new tokens that each state has accepted

    def after(self, b: int, tokens: Sequence[int]) -> GrammarState | None:
        """Return the state of row b after its new tokens, until the next call; None if the grammar refuses them."""
        state, reached = self.states[b], self._reached[b]
        common = common_prefix(reached, tokens)
        if common < len(reached):
            state.rollback(len(reached) - common)
            del reached[common:]
        for token in tokens[common:]:
            if not state.accept(token):
                return None
            reached.append(token)
        return state

    def masked(self, scores: Tensor, texts: Sequence[Sequence[Tensor]], ruled_out: Tensor | None = None) -> Tensor:
        """Mask the scores of every node.

        Args:
            scores: (B, N, V) float32.
            texts: [b][n] is the text (T,) int64 of row b up to node n, in `generate()`'s layout.
            ruled_out: (B, N) bool, nodes that cannot be reached.

        Returns:
            (B, N, V) float32, -inf for tokens that the grammar forbids.

        Raises:
            ValueError: the grammar refuses what a row has written. Nodes of drafts that it refuses keep their scores:
                their first token has a score of -inf after its parent.
        """
        allowed = torch.ones(scores.shape, dtype=torch.bool)
        skipped = [[False] * len(row) for row in texts] if ruled_out is None else ruled_out.tolist()
        for b, row in enumerate(texts):
            written = min(map(len, row))  # the others continue with drafted tokens
            for n, text in enumerate(row):
                if skipped[b][n]:
                    continue
                tokens = text[self.start :].tolist()
                state = self.after(b, tokens)
                if state is not None:
                    allowed[b, n] = state.allowed(scores.shape[-1])
                elif len(text) == written:
                    raise ValueError(
                        f"the grammar refuses the text of row {b}, which ends in token {tokens[-1]}: another processor "
                        "forbade all tokens that the grammar allows, or forced one that it forbids. Leave that one out"
                    )
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))
