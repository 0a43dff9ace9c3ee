"""`TextMemory`: the texts of past calls, with an index that finds earlier occurrences of a text's end.

A memory may be shared between threads.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

LEVELS = (4, 2, 1)  # lengths of the indexed n-grams, longest first
PLACES = 64  # most recent occurrences kept per n-gram
LONGEST = 32  # largest match length in tokens
MATCHES = 16  # largest number of matches returned
BITS = 24  # bits per token in an n-gram's key
FORMAT = "specdec texts 1"


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the last `length` tokens of a text.

    Attributes:
        text: the number of the text with the occurrence.
        end: the index after the occurrence in this text.
        length: length of the match in tokens, at most `LONGEST`.
        following: the tokens after the occurrence.
    """

    text: int
    end: int
    length: int
    following: list[int]


class TextMemory:
    """Texts of past calls, indexed by their n-grams, for `SuffixProposer`.

    Above `capacity` tokens, the texts that were least recently matched or written are dropped. The index takes 0.3 to
    0.6 KB per token. A match of an n-gram is extended to the left token by token, so the index serves matches of every
    length. A suffix tree finds the same matches in as many steps, but needs several nodes per token.

    Args:
        capacity: the largest number of tokens in all texts. The text being written is always kept whole.

    Raises:
        ValueError: `capacity` is negative.

    Examples:
        >>> memory = TextMemory()
        >>> first, second = memory.new(), memory.new()
        >>> memory.write(first, [1, 2, 3, 4, 5])
        >>> memory.write(second, [2, 3, 4])
        >>> memory.matches(second, length=1)
        [Match(text=0, end=4, length=3, following=[5])]
    """

    def __init__(self, capacity: int = 200_000):
        if capacity < 0:
            raise ValueError(f"capacity must be at least 0 tokens, got {capacity}")
        self.capacity = capacity
        self._texts: OrderedDict[int, list[int]] = OrderedDict()  # least recently used first
        self._places: dict[int, list[tuple[int, int]]] = {}  # n-gram -> (text, end), most recent last
        self._numbers, self._size = count(), 0
        self._lock = RLock()

    def __len__(self) -> int:
        """Number of tokens in all texts."""
        return self._size

    def new(self) -> int:
        """Return the number for a new text. The text exists from its first `write`."""
        return next(self._numbers)

    def write(self, text: int, tokens: Sequence[int], keep: Set[int] = frozenset()) -> None:
        """Append tokens to a text. A text that was dropped in the meantime starts empty.

        Args:
            text: the number of the text, from `new`.
            tokens: the token ids to append.
            keep: numbers of other texts that are not dropped to make room, such as the rows of the same batch.
        """
        with self._lock:
            known = self._texts.setdefault(text, [])
            for token in tokens:
                known.append(token)
                self._size += 1
                place = (text, len(known))
                for ngram in _ngrams(known, len(known)):
                    places = self._places.setdefault(ngram, [])
                    places.append(place)
                    if len(places) > 2 * PLACES:
                        del places[:-PLACES]
            self._texts.move_to_end(text)
            if self._size > self.capacity:
                for oldest in [number for number in self._texts if number != text and number not in keep]:
                    self._forget(oldest)
                    if self._size <= self.capacity:
                        break

    def matches(self, text: int, length: int, near: Iterable[tuple[int, int]] = ()) -> list[Match]:
        """Find earlier occurrences of the text's end.

        Args:
            text: the number of the text.
            length: the number of following tokens to return per match. In the same text, a continuation that reaches
                the end repeats from the match.
            near: likely places (text, end), for example the continuations of earlier matches.

        Returns:
            Up to `MATCHES` matches, the longest first, then the most recent. Matches shorter than half of the longest
            are left out.
        """
        with self._lock:
            own = self._texts.get(text, [])
            found = {place: back for place in near if (back := self._common(own, *place)) >= LEVELS[0]}
            for ngram in _ngrams(own, len(own)):
                places = reversed(self._places.get(ngram, ())[-PLACES:])
                found |= {place: self._common(own, *place) for place in places if self._goes_on(*place)}
                if found:
                    break
            best = max(found.values(), default=0)
            ranked = sorted((place for place in found if 2 * found[place] >= best), key=lambda p: -found[p])
            out = [Match(*place, found[place], self._following(text, *place, length)) for place in ranked[:MATCHES]]
            for match in reversed(out):
                self._texts.move_to_end(match.text)
            return out

    def texts(self) -> Iterator[list[int]]:
        """Iterate over the texts as lists of token ids, the least recently used one first."""
        with self._lock:
            return iter([list(text) for text in self._texts.values()])

    def copy(self) -> TextMemory:
        """Return a memory of the same texts. What is written to one of them later is not in the other."""
        made = TextMemory(self.capacity)
        for text in self.texts():
            made.write(made.new(), text)
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the texts to a safetensors file. A file of older texts is replaced atomically.

        Raises:
            ValueError: the path holds a file that is not a `TextMemory`.
        """
        if Path(path).exists():
            try:
                _opened(path)
            except ValueError as error:
                raise ValueError(
                    f"{path} is not a TextMemory file and would be overwritten: choose another name"
                ) from error
        texts = list(self.texts())
        tensors = {
            "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
            "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int64),
        }
        path = Path(path)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        save_file(tensors, part, metadata={"format": FORMAT})
        part.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], capacity: int = 200_000) -> TextMemory:
        """Load a memory that `save` wrote.

        Args:
            path: the safetensors file.
            capacity: see `TextMemory`. If the file holds more tokens, the most recently used texts are kept.

        Raises:
            ValueError: the file is not a `TextMemory`.
        """
        with _opened(path) as file:
            tokens, lengths = file.get_tensor("tokens"), file.get_tensor("lengths")
        memory = cls(capacity)
        for text in tokens.split(lengths.tolist()):
            memory.write(memory.new(), text.tolist())
        return memory

    def _goes_on(self, text: int, end: int) -> bool:
        return end < len(self._texts.get(text, ()))

    def _common(self, own: Sequence[int], text: int, end: int) -> int:
        """Length of the match between the tokens before a place and the end of `own`."""
        if not self._goes_on(text, end):
            return 0
        other, most = self._texts[text], min(LONGEST, len(own), end)
        for back in range(1, most + 1):
            if own[-back] != other[end - back]:
                return back - 1
        return most

    def _following(self, own: int, text: int, end: int, length: int) -> list[int]:
        known = self._texts[text]
        period = len(known) - end
        return [known[end + i % period] for i in range(length)] if text == own else known[end : end + length]

    def _forget(self, text: int) -> None:
        known = self._texts.pop(text)
        self._size -= len(known)
        for end in range(1, len(known) + 1):
            for ngram in _ngrams(known, end):
                places = self._places.get(ngram)
                if places is None:
                    continue
                if (text, end) in places:
                    places.remove((text, end))
                if not places:
                    del self._places[ngram]


def _opened(path: str | os.PathLike[str]) -> Any:
    """Open a file that `TextMemory.save` wrote."""
    try:
        file = safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): expected a file written by TextMemory.save") from error
    if (file.metadata() or {}).get("format") != FORMAT:
        raise ValueError(f"{path} is not a TextMemory file: expected one written by TextMemory.save")
    return file


def _ngrams(tokens: Sequence[int], end: int) -> Iterator[int]:
    """Keys of the n-grams of `LEVELS` that end at `end`, the longest first. A shorter text has fewer."""
    for n in LEVELS:
        if n <= end:
            number = 1
            for token in tokens[end - n : end]:
                number = number << BITS | token
            yield number
