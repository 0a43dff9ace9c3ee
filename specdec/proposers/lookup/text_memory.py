"""`TextMemory`: texts that were read and written, and where in them a text's end occurred before.

Owns the texts and their index. Knows nothing of drafts. Threads may share it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

LEVELS = (4, 2, 1)  # lengths of the n-grams whose places are known, longest first
PLACES = 64  # kept per n-gram: the most recent
LONGEST = 32  # tokens that a match is followed back
MATCHES = 16  # returned at most
BITS = 24  # of a token, in an n-gram's number
FORMAT = "specdec texts 1"


@dataclass(frozen=True)
class Match:
    """A place where the same `length` tokens stood, at most `LONGEST`.

    Attributes:
        text: whose. end: of these tokens, in it. following: what came next there.
    """

    text: int
    end: int
    length: int
    following: list[int]


class TextMemory:
    """Holds `capacity` tokens: of more, the texts that were least recently matched or written go.

    An entry per token and n-gram length, 0.3 to 0.6 KB a token in all, serves every length of match: a match of the
    longest n-gram is followed back token by token. A suffix tree would find the same in as many steps and takes several
    nodes a token.

    Args:
        capacity: tokens of all texts. The text being written is kept whole, whatever its length.
    """

    def __init__(self, capacity: int = 200_000):
        if capacity < 0:
            raise ValueError(f"capacity must be at least 0 tokens, got {capacity}")
        self.capacity = capacity
        self._texts: OrderedDict[int, list[int]] = OrderedDict()  # the least recently used one first
        self._places: dict[int, list[tuple[int, int]]] = {}  # n-gram -> (text, end), the most recent last
        self._numbers, self._size = count(), 0
        self._lock = RLock()

    def __len__(self) -> int:
        """Tokens held."""
        return self._size

    def new(self) -> int:
        """The number of a text that is about to be written."""
        return next(self._numbers)

    def write(self, text: int, tokens: Sequence[int]) -> None:
        """Append to a text. One that was forgotten meanwhile begins anew."""
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
            while self._size > self.capacity and len(self._texts) > 1:
                self._forget(next(iter(self._texts)))

    def matches(self, text: int, length: int, near: Iterable[tuple[int, int]] = ()) -> list[Match]:
        """Where else the text's end occurred, the longest match first, then the most recent; none that is less than
        half as long as the longest.

        Args:
            length: tokens wanted of what follows. In the same text, what reaches its end goes on from the match.
            near: places (text, end) that are likely: where an earlier match went on.
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
        """Those held, the least recently used one first."""
        with self._lock:
            return iter([list(text) for text in self._texts.values()])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the texts into a safetensors file; texts that were there are replaced at once or not at all.

        Raises:
            ValueError: the file is something else.
        """
        if Path(path).exists():
            try:
                _opened(path)
            except ValueError as error:
                raise ValueError(f"{path} is no file of texts, and would be lost: choose another name") from error
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
        """What `save` wrote; of more texts than `capacity` the most recently used ones.

        Raises:
            ValueError: the file is something else.
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
        """How many of the tokens before a place are those that `own` ends in."""
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
    """A file that `TextMemory.save` wrote."""
    try:
        file = safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): write one with TextMemory.save") from error
    if (file.metadata() or {}).get("format") != FORMAT:
        raise ValueError(f"{path} holds no texts: write one with TextMemory.save")
    return file


def _ngrams(tokens: Sequence[int], end: int) -> Iterator[int]:
    """Numbers of the n-grams of `LEVELS` that end there, the longest first; a shorter text has fewer."""
    for n in LEVELS:
        if n <= end:
            number = 1
            for token in tokens[end - n : end]:
                number = number << BITS | token
            yield number
