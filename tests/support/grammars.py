"""A small grammar for tests without a grammar library: fixed texts, and letters in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec import GrammarProcessor, GrammarState

LETTERS = "abcdefgh"
# Token 0 ends. The characters come first and then what pairs of tokens merge to, as in a byte-pair vocabulary.
TOKENS = ["<end>", *'{}":,', *LETTERS, "ab", '":', "abc", '{"', "de", '",', '":"', "fg", "gh", '","']
RECORD = ['{"', "abcde", '":"', None, '","', "fgh", '":"', None, '"}']


class Template(GrammarState):
    """Accepts fixed texts with at least one letter where the template has None, and then the end.

    Args:
        template: texts, and None for letters. A text follows letters, and begins with another character.
        tokens: the text of each token.
        encodes: False for a library that does not know what its tokens look like.
    """

    def __init__(self, template: Sequence[str | None], tokens: Sequence[str] = TOKENS, encodes: bool = True):
        self.template, self.tokens, self.encodes = template, tokens, encodes
        self.places: list[tuple[int, int]] = [(0, 0)]  # part and character, after each accepted token
        self.asked = 0

    def accept(self, token: int) -> bool:
        place = self._after(token)
        if place is not None:
            self.places.append(place)
        return place is not None

    def rollback(self, count: int) -> None:
        assert 0 < count < len(self.places)
        del self.places[len(self.places) - count :]

    def allowed(self, vocab_size: int) -> Tensor:
        self.asked += 1
        if self.ended:
            return torch.arange(vocab_size) == 0
        return torch.tensor([self._after(token) is not None for token in range(vocab_size)])

    @property
    def ended(self) -> bool:
        return self.places[-1][0] > len(self.template)

    def forced_text(self) -> bytes:
        part, done = self.places[-1]
        if part >= len(self.template) or self.template[part] is None:
            return b""
        text = ""
        while part < len(self.template) and self.template[part] is not None:
            text, part, done = text + self.template[part][done:], part + 1, 0
        return text.encode()

    def vocabulary(self) -> list[bytes] | None:
        return [token.encode() for token in self.tokens] if self.encodes else None

    def _after(self, token: int) -> tuple[int, int] | None:
        """The place after a token; None if it is refused."""
        part, done = self.places[-1]
        if token >= len(self.tokens):
            return None
        if token == 0 or self.ended:
            return (len(self.template) + 1, 0) if part >= len(self.template) else None
        for character in self.tokens[token]:
            if part >= len(self.template):
                return None
            if self.template[part] is None and character in LETTERS:
                done += 1
                continue
            if self.template[part] is None and done:
                part, done = part + 1, 0
            if self.template[part] is None or self.template[part][done] != character:
                return None
            part, done = (part + 1, 0) if done + 1 == len(self.template[part]) else (part, done + 1)
        return part, done


def processor(*templates: Sequence[str | None], encodes: bool = True) -> GrammarProcessor:
    """A processor of one template for all rows, or of one for each."""

    def states(batch_size: int) -> list[GrammarState]:
        given = templates * batch_size if len(templates) == 1 else templates
        return [Template(template, encodes=encodes) for template in given]

    return GrammarProcessor(states)
