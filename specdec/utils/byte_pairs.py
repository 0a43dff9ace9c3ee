"""`BytePairs`: the tokens of a text, by a vocabulary alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


class BytePairs:
    """Byte-pair encoding without the tokenizer's files: the pair with the lowest token id is merged first.

    Token ids are in the order of the merges in almost all tokenizers of this kind, and the splitting before it hardly
    matters for short texts. Other tokenizers may split a text in another way.

    Args:
        vocabulary: the bytes of each token, by token id.

    Examples:
        >>> BytePairs([b"a", b"b", b"c", b"bc", b"ab"]).encode(b"abc")
        [0, 3]
    """

    def __init__(self, vocabulary: Sequence[bytes]):
        self._vocabulary = vocabulary
        self._ids = {token: index for index, token in enumerate(vocabulary)}

    def begins(self, token: int, text: bytes) -> bool:
        """Return True if the token's bytes begin with `text`; False for a token outside the vocabulary."""
        return token < len(self._vocabulary) and self._vocabulary[token].startswith(text)

    def encode(self, text: bytes) -> list[int]:
        """Return the token ids of a text; [] if one of its bytes is no token."""
        parts = [text[i : i + 1] for i in range(len(text))]
        while True:
            pairs = [first + second for first, second in pairwise(parts)]
            best = min((pair for pair in pairs if pair in self._ids), key=self._ids.__getitem__, default=None)
            if best is None:
                break
            place = pairs.index(best)
            parts[place : place + 2] = [best]
        return [self._ids[part] for part in parts] if all(part in self._ids for part in parts) else []
