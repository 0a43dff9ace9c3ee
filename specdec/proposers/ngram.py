"""`NgramProposer`: looks the last tokens up in the prompt and the output, and drafts what followed them there.

Prompt lookup decoding, over an index that grows with the text instead of a scan per round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.proposers.base import Context, Proposer
from specdec.tree import DraftTree

KEY_POSITIONS = 32  # keys tell positions in a draft apart up to here


class NgramProposer(Proposer):
    """The longest n-gram first, the most recent occurrence first.

    Args:
        max_ngram: longest n-gram looked up, in tokens.
        min_ngram: shortest one.
        continuations: how many different continuations to draft per row; above one they form a tree.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, continuations: int = 1):
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got min_ngram={min_ngram}, max_ngram={max_ngram}")
        if continuations < 1:
            raise ValueError(f"continuations must be at least 1, got {continuations}")
        self.max_ngram, self.min_ngram, self.continuations = max_ngram, min_ngram, continuations
        self._texts: list[list[int]] = []
        self._index: list[dict[tuple[int, ...], list[int]]] = []  # n-gram -> where it ended, in order

    def begin(self, context: Context) -> None:
        self._texts = [[] for _ in range(context.batch_size)]
        self._index = [{} for _ in range(context.batch_size)]

    def propose(self, context: Context) -> DraftTree:
        rows = context.rows
        if context.pacer.limit == 0:
            return DraftTree.root_only(context.root)
        found: list[list[tuple[int, list[int]]]] = [[] for _ in range(context.batch_size)]
        for b in rows:
            self._read(b, context.row(b)[len(self._texts[b]) :].tolist())
            found[b] = self._lookup(b, min(context.room[b], context.pacer.limit))
        length = self._length(context, [found[b][0] for b in rows if found[b]])
        if length == 0:
            return DraftTree.root_only(context.root)
        if self.continuations > 1 and not context.chains_only:
            return _tree(context, [[tokens[:length] for _, tokens in row] for row in found])
        drafts = [row[0][1][:length] if row else [] for row in found]
        keys = [[_key(row[0][0], i) for i in range(length)] if row else [] for row in found]
        return context.chain(drafts, keys)

    def _read(self, b: int, tokens: Sequence[int]) -> None:
        text, index = self._texts[b], self._index[b]
        for token in tokens:
            text.append(token)
            for n in range(self.min_ngram, self.max_ngram + 1):
                if n <= len(text):
                    index.setdefault(tuple(text[-n:]), []).append(len(text))

    def _lookup(self, b: int, length: int) -> list[tuple[int, list[int]]]:
        """Up to `continuations` different ones, each with the length of the n-gram that led to it."""
        text, index = self._texts[b], self._index[b]
        out: list[tuple[int, list[int]]] = []
        for n in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            for end in reversed(index.get(tuple(text[-n:]), ())[-1 - 4 * self.continuations :]):
                period = len(text) - end  # past the end of the text, the draft repeats itself
                if period and all(text[end] != other[0] for _, other in out):
                    out.append((n, [text[end + i % period] for i in range(length)]))
                    if len(out) == self.continuations:
                        return out
        return out

    def _length(self, context: Context, found: Sequence[tuple[int, list[int]]]) -> int:
        """How many of the found tokens to draft, by the acceptance of earlier ones like them."""
        pacer, chances, length = context.pacer, [1.0] * len(found), 0
        while found:
            chances = [
                chance * pacer.acceptance.rate(_key(n, length)) if length < len(tokens) else 0.0
                for chance, (n, tokens) in zip(chances, found, strict=True)
            ]
            if not any(chances) or not pacer.worth(chances, length):
                break
            length += 1
        return length


def _key(n: int, position: int) -> int:
    return 1 + n * KEY_POSITIONS + min(position, KEY_POSITIONS - 1)


def _tree(context: Context, continuations: Sequence[Sequence[Sequence[int]]]) -> DraftTree:
    """Continuations with different first tokens, side by side behind the root."""
    roots = context.root.tolist()
    tokens, parents = [], []
    for root, row in zip(roots, continuations, strict=True):
        row_tokens, row_parents = [root], [-1]
        for continuation in row:
            for i, token in enumerate(continuation):
                row_parents.append(len(row_tokens) - 1 if i else 0)
                row_tokens.append(token)
        tokens.append(row_tokens)
        parents.append(row_parents)
    size = max(map(len, tokens))
    device = context.tokens.device
    return DraftTree(
        torch.tensor([row + [0] * (size - len(row)) for row in tokens], device=device),
        torch.tensor([row + [-1] * (size - len(row)) for row in parents], device=device),
        chain=all(len(row) < 2 for row in continuations),
    )
