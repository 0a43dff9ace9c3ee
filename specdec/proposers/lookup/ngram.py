"""`NgramProposer`: prompt lookup decoding, with an index that grows with the text instead of a scan per round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.proposers.context import Context
from specdec.proposers.lookup.base import (
    LENGTHS,
    LIKELY,
    Candidate,
    Lookup,
    expected,
    kind_of,
    laid_out,
    longest,
    new_tokens,
    writable,
)
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.draft_tree import DraftTree
from specdec.utils.prefix import common_prefix

PLACES = 16  # most recent occurrences of an n-gram that are searched for the longest match


class NgramProposer(Lookup):
    """Looks the last tokens up in the prompt and the output, and drafts the tokens that followed them there.

    If the text is [1, 2, 3, 4, 2, 3], its last two tokens occurred before, and [4, 2, 3] is drafted. The longest match
    is preferred, then the most recent one. This is prompt lookup decoding
    (https://github.com/apoorvumang/prompt-lookup-decoding).

    Args:
        max_ngram: length of the longest n-gram to look up, in tokens. Matches are then extended to the left.
        min_ngram: length of the shortest n-gram to look up.
        continuations: the number of different continuations to draft per row. More than one form a tree.

    Attributes:
        guesses: the best match of each row in the last round, drafted or not. None: no match.

    Raises:
        ValueError: not 1 <= min_ngram <= max_ngram, or continuations < 1.

    Example:
        ```python
        spec = SpeculativeGenerator(model, NgramProposer(max_ngram=4))
        output = spec.generate(input_ids, max_new_tokens=128)
        ```
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, continuations: int = 1):
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"expected 1 <= min_ngram <= max_ngram, got min_ngram={min_ngram}, max_ngram={max_ngram}")
        if continuations < 1:
            raise ValueError(f"continuations must be at least 1, got {continuations}")
        self.max_ngram, self.min_ngram, self.continuations = max_ngram, min_ngram, continuations

    def begin(self, context: Context) -> None:
        rows = range(context.batch_size)
        self._texts: list[list[int]] = [[] for _ in rows]
        self._index: list[dict[tuple[int, ...], list[int]]] = [{} for _ in rows]  # n-gram -> its end positions, rising
        self._found: list[list[Guess]] = []  # this round's
        self.guesses: list[Guess | None] = [None for _ in rows]
        self._vocab_size = context.vocab_size
        self._sources = [0 for _ in rows]  # tokens of the encoder's input, indexed before the text
        if context.pacer.limit:  # index the prompts before the first round
            for b in context.rows:
                source = context.source_text(b)
                self._sources[b] = len(source)
                self._read(b, source + context.row(b).tolist(), context.pacer)

    def expect(self, context: Context) -> list[float]:
        """Look the rows up. Returns the expected accepted tokens per depth, for the best guess of each row.

        A row counts up to its budget.
        """
        pacer = context.pacer
        self._found = [[] for _ in range(context.batch_size)]
        if pacer.limit == 0:
            return []
        for b, tokens in new_tokens(context, self._known).items():
            self._read(b, tokens, pacer)
            self._found[b] = self._lookup(b, longest(context, b))
            self.guesses[b] = self._found[b][0] if self._found[b] else None
        return expected([self.candidates(context, b) for b in range(context.batch_size)])

    @property
    def _known(self) -> list[int]:
        """Indexed tokens of each row's text, without the encoder's input."""
        return [len(text) - source for text, source in zip(self._texts, self._sources, strict=True)]

    def draft(self, context: Context, gains: Sequence[float]) -> DraftTree:
        length = context.pacer.best_length(gains, context.batch_size)
        if length == 0:
            return DraftTree.root_only(context.root)
        if self.continuations > 1 and not context.chains_only:
            cut = [min(length, budget) for budget in context.budget]
            return laid_out(
                context, [_side_by_side([g.tokens[: cut[b]] for g in row]) for b, row in enumerate(self._found)]
            )
        return context.chain([row[0].tokens[:length] if row else [] for row in self._found])

    def _read(self, b: int, tokens: Sequence[int], pacer: Pacer) -> None:
        """Index the new tokens of row b, and record how far its last guess agrees with them.

        A guess counts whether it was drafted or not: tokens that agree with the text would have been accepted.
        """
        guess = self.guesses[b]
        if guess is not None:
            pacer.observe_confidence(guess.confidence_bins[: len(tokens)], common_prefix(guess.tokens, tokens))
        text, index = self._texts[b], self._index[b]
        for token in tokens:
            text.append(token)
            for n in range(self.min_ngram, self.max_ngram + 1):
                if n <= len(text):
                    index.setdefault(tuple(text[-n:]), []).append(len(text))

    def _lookup(self, b: int, length: int) -> list[Guess]:
        """Find up to `continuations` different continuations of row b, each `length` tokens long."""
        text, places = self._texts[b], max(PLACES, 4 * self.continuations)
        out: list[Guess] = []
        for n in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            ends = self._index[b].get(tuple(text[-n:]), [])[-1 - places :]
            matches = [(_matched(text, end, n), end) for end in ends if end < len(text)]
            for matched, end in sorted(matches, reverse=True):
                if any(text[end] == other.tokens[0] for other in out):
                    continue
                period = len(text) - end  # at the end of the text, the draft repeats itself
                following = writable([text[end + i % period] for i in range(length)], self._vocab_size)
                if following:
                    out.append(Guess(matched, following))
                    if len(out) == self.continuations:
                        return out
        return out

    def candidates(self, context: Context, b: int) -> list[Candidate]:
        chance, rate = 1.0, None
        found: list[Candidate] = []
        for guess in self._found[b][:1]:
            most = min(context.budget[b], context.pacer.limit)  # a budget may be millions of tokens
            for token, key in zip(guess.tokens[:most], guess.confidence_bins, strict=False):
                # The prior of a bin is the rate of the token before; for the first token it is LIKELY.
                rate = context.pacer.acceptance.rate(key, like=LIKELY[key[1]] if rate is None else rate)
                chance *= rate
                found.append((chance, token, len(found) - 1))
        return found


@dataclass(frozen=True)
class Guess:
    """A continuation of a row.

    Attributes:
        length: length of the match that it follows, in tokens.
        tokens: the tokens of the continuation.
    """

    length: int
    tokens: list[int]

    @property
    def confidence_bins(self) -> list[tuple[str, int]]:
        """The confidence bin of each token. A correct token makes the match before the next one longer."""
        return [("ngram", kind_of(self.length + depth)) for depth in range(len(self.tokens))]


def _matched(text: Sequence[int], end: int, n: int) -> int:
    """Length of the match between the tokens before `end` and the end of the text, from n up to the longest bin."""
    while n <= LENGTHS[-1] and n < end and text[end - 1 - n] == text[-1 - n]:
        n += 1
    return n


def _side_by_side(guesses: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Combine continuations with different first tokens into one tree: tokens, and parents (-1: the root)."""
    tokens: list[int] = []
    parents: list[int] = []
    for guess in guesses:
        for i, token in enumerate(guess):
            parents.append(len(tokens) - 1 if i else -1)
            tokens.append(token)
    return tokens, parents
