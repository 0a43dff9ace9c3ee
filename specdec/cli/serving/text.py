"""`TextDecoder` and `StopStrings`: an answer's text while its tokens arrive, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 8  # tokens before a text that are decoded with it
UNFINISHED = "\ufffd"  # replacement character, decoded from an incomplete character


class TextDecoder:
    """Decodes tokens one by one. The parts together are the text of all tokens, without special tokens.

    Args:
        tokenizer: tokenizer of the model.
        before: token ids of a text that the tokens continue. Some tokenizers drop the blank at the start of a text.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # From the start of the part before the pending one: it changes how this decodes.
        self._tokens = list(before[-CONTEXT:])
        if self._decoded(self._tokens).endswith(UNFINISHED):
            self._tokens = []
        self._pending = len(self._tokens)  # place of the first token whose text was not returned

    def add(self, token: int) -> str:
        """Return the text that a token completes: empty within a character of several tokens."""
        self._tokens.append(token)
        text = self._pending_text()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._tokens, self._pending = self._tokens[self._pending :], len(self._tokens) - self._pending
        return text

    def end(self) -> str:
        """Return the rest, such as an incomplete character."""
        text = self._pending_text()
        self._tokens, self._pending = [], 0
        return text

    def _pending_text(self) -> str:
        return self._decoded(self._tokens)[len(self._decoded(self._tokens[: self._pending])) :]

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopStrings:
    """Cuts a text that arrives in parts before the first stop string. Never returns the beginning of one too early.

    Args:
        stops: the stop strings.

    Attributes:
        found: True after a stop string.

    Examples:
        >>> stops = StopStrings(["END"])
        >>> stops.add("a E"), stops.add("x EN"), stops.add("D b"), stops.found
        ('a ', 'Ex ', '', True)
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = list(stops), ""
        self.found = False

    def __bool__(self) -> bool:
        return bool(self._stops)

    def add(self, part: str) -> str:
        """Return the text that is known to come before any stop string."""
        if self.found:
            return ""
        text = self._held + part
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        self.found = bool(places)
        ready = min(places) if places else len(text) - self._possible(text)
        self._held = "" if self.found else text[ready:]
        return text[:ready]

    def end(self) -> str:
        """Return what was held back, when no further text follows."""
        text, self._held = self._held, ""
        return text

    def _possible(self, text: str) -> int:
        """Length of the longest end of `text` that may begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
