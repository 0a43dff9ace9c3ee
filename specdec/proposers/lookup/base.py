"""`Lookup`: a proposer that finds its drafts instead of computing them, and so knows beforehand what to expect of them.

Owns what n-grams and suffixes have in common: taking in what rows gained, what a match is worth, and laying out what
was found.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile

import torch

from specdec.proposers.base import Context, Proposer
from specdec.proposers.pacing.pacer import LONGEST
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.results import depths_of
from specdec.utils.device_copies import uploaded

LENGTHS = (1, 2, 3, 5, 8, 16)  # of matches that are told apart, in tokens; the last kind is of longer ones
# How often the next token was the one that stood behind a match of these kinds, of answers that nobody knew before
# (Qwen2.5-Coder-0.5B-Instruct's: `benchmarks/regression/lookups.py --matches`). What texts show soon counts for more.
LIKELY = (0.23, 0.52, 0.62, 0.72, 0.79, 0.87, 0.97)


class Lookup(Proposer):
    """Drafting is free: what pays of what was found is decided once it is known (see `HybridProposer`, too)."""

    def propose(self, context: Context) -> DraftTree:
        return self.draft(context, self.expect(context))

    @abstractmethod
    def expect(self, context: Context) -> list[float]:
        """Look the text up; per node of a row, best first, how many of them are expected to be accepted, over all
        rows. What `draft` would draft is right with these chances; nothing found: []."""

    @abstractmethod
    def draft(self, context: Context, gains: Sequence[float]) -> DraftTree:
        """As much as pays of what `expect` found. gains: what it returned."""


def new_tokens(context: Context, known: Sequence[int]) -> dict[int, list[int]]:
    """Of each row worth drafting for, the tokens behind the first `known[b]`."""
    lengths = context.lengths
    return {b: context.recent(b, lengths[b] - known[b]) for b in context.rows}


def longest(context: Context, row: int) -> int:
    """How many tokens are looked up for a row: not many more than it can take, however long drafts may be."""
    return min(context.pacer.limit, max(LONGEST, context.budget[row]))


def kind_of(length: int) -> int:
    """Of a match so long: the place in LIKELY."""
    return bisect_left(LENGTHS, length)


def agreeing(guess: Sequence[int], text: Sequence[int]) -> int:
    """Length of their common beginning."""
    for count, (ours, theirs) in enumerate(zip(guess, text, strict=False)):
        if ours != theirs:
            return count
    return min(len(guess), len(text))


def writable(tokens: list[int], vocab_size: int) -> list[int]:
    """As far as the target could write them: a prompt may hold placeholders of pictures that have no logits (Mllama's),
    and a memory what another target wrote."""
    if max(tokens, default=0) < vocab_size:
        return tokens
    return list(takewhile(lambda token: token < vocab_size, tokens))


def laid_out(context: Context, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> DraftTree:
    """A deterministic draft.

    Args:
        rows: for each its tokens, and for each of these the place of its parent among them, -1: the root. Parents
            come first.
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
