"""`Lookup`: base class of proposers that look drafts up in known text, and helpers that they share.

The helpers collect new tokens, estimate how likely a match is to be accepted, and lay matches out as a `DraftTree`.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile

import torch

from specdec.proposers.base import Proposer
from specdec.proposers.context import Context
from specdec.proposers.pacing.pacer import LONGEST
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import depths_of
from specdec.utils.device_copies import uploaded

LENGTHS = (1, 2, 3, 5, 8, 16)  # upper bounds of the match-length bins, in tokens; the last bin holds longer matches
# How often the token after a match in each bin was the next token of the text. Measured on answers of
# Qwen2.5-Coder-0.5B-Instruct (`benchmarks/regression/lookups.py --matches`). Observations soon outweigh these priors.
LIKELY = (0.23, 0.52, 0.62, 0.72, 0.79, 0.87, 0.97)
# A token that may follow a row: the chance that it and all tokens before it are accepted, its id, and the index of its
# parent among the row's candidates (-1: the root).
Candidate = tuple[float, int, int]


class Lookup(Proposer):
    """A proposer without draft passes: it finds candidates first, then decides how many are worth verifying."""

    paces_itself = True

    def propose(self, context: Context) -> DraftTree:
        return self.draft(context, self.expect(context))

    @abstractmethod
    def expect(self, context: Context) -> list[float]:
        """Look the text up.

        Returns:
            For each node index of a row, best first, how many of these nodes are expected to be accepted over all
            rows. [] if nothing was found.
        """

    @abstractmethod
    def candidates(self, context: Context, b: int) -> list[Candidate]:
        """The tokens that `expect` found for row b, the likeliest first, parents before their children."""

    def draft(self, context: Context, gains: Sequence[float]) -> DraftTree:
        """Draft the part of the candidates found by `expect` that is worth verifying. gains: its return value."""
        size = context.pacer.best_length(gains, context.batch_size)
        found = [self.candidates(context, b)[:size] for b in range(context.batch_size)]
        return laid_out(context, [([token for _, token, _ in row], [parent for *_, parent in row]) for row in found])


def new_tokens(context: Context, known: Sequence[int], rows: Sequence[int] | None = None) -> dict[int, list[int]]:
    """The tokens after the first `known[b]` of each row, by row. rows: those to draft for by default."""
    lengths = context.lengths
    return {b: context.recent(b, max(0, lengths[b] - known[b])) for b in (context.rows if rows is None else rows)}


def longest(context: Context, row: int) -> int:
    """The number of tokens to look up for a row: the pacer's limit, capped at max(LONGEST, the row's budget)."""
    return min(context.pacer.limit, max(LONGEST, context.budget[row]))


def expected(rows: Sequence[Sequence[Candidate]]) -> list[float]:
    """For each index of a candidate, how many of these are expected to be accepted over all rows."""
    gains = [0.0] * max(map(len, rows))
    for row in rows:
        for i, (chance, *_) in enumerate(row):
            gains[i] += chance
    return gains


def kind_of(length: int) -> int:
    """The bin of a match of this length, an index into LIKELY."""
    return bisect_left(LENGTHS, length)


def writable(tokens: list[int], vocab_size: int) -> list[int]:
    """The tokens before the first one that is outside the target's vocabulary.

    A prompt may hold image placeholders without logits (Mllama), and a memory may hold texts of another target.
    """
    if max(tokens, default=0) < vocab_size:
        return tokens
    return list(takewhile(lambda token: token < vocab_size, tokens))


def laid_out(context: Context, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> DraftTree:
    """Build a deterministic draft from one tree per row.

    Args:
        context: the state of the batch.
        rows: for each row its tokens, and for each token the index of its parent among them (-1: the root). Parents
            come before their children.
    """
    size = 1 + max((len(tokens) for tokens, _ in rows), default=0)
    if size == 1:
        return DraftTree.root_only(context.root)
    tokens = [[0, *tokens] + [0] * (size - 1 - len(tokens)) for tokens, _ in rows]
    parents = [[-1, *(1 + parent for parent in parents)] + [-1] * (size - 1 - len(parents)) for _, parents in rows]
    padded, shape = uploaded([tokens, parents], context.tokens.device)
    chain = all(parent == i - 1 for _, parents in rows for i, parent in enumerate(parents))
    levels = max(max(depths_of(row)) for row in parents)
    return DraftTree(torch.cat([context.root[:, None], padded[:, 1:]], 1), shape, chain=chain, levels=levels)
