"""Log probabilities of an answer's tokens, and of the likeliest tokens at each place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec.cli.serving.text import UNFINISHED

LEAST = -9999.0  # OpenAI's number for a very unlikely token: JSON has no infinity


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log probability.

    Attributes:
        text: the token's text.
        bytes: the same in UTF-8, also of a part of a character; None if unknown.
        logprob: natural logarithm of the probability.
        start: place in the answer at which the token's text begins.
        top: the likeliest tokens at this place.
    """

    text: str
    bytes: list[int] | None
    logprob: float
    start: int = 0
    top: tuple[TokenLogprob, ...] = ()


class LogprobRecorder(LogitsProcessor):
    """Keeps the log probabilities of the next tokens until it is known which token was chosen; changes no score.

    It keeps state, so specdec calls it as plain decoding does: once for each place that is reached. It comes before the
    request's own processors and before temperature.

    Args:
        tokenizer: tokenizer of the model.
        count: number of likeliest tokens to report.
    """

    def __init__(self, tokenizer: Any, count: int):
        self._tokenizer, self._count = tokenizer, count
        self._rows: dict[int, Tensor] = {}  # length of the text -> (V,) log probabilities of the next token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (1, V) unchanged."""
        self._rows[input_ids.shape[1]] = scores[0].float().log_softmax(-1)
        return scores

    def take(self, length: int, token: int, start: int) -> TokenLogprob:
        """Return the entry of the token that was chosen after a text of this length."""
        row = self._rows.pop(length)
        values, ids = row.topk(min(self._count, len(row)))
        top = [self._entry(*pair) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
        chosen = self._entry(token, float(row[token]))
        return TokenLogprob(chosen.text, chosen.bytes, chosen.logprob, start, tuple(top))

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        text = token_text(self._tokenizer, token)
        return TokenLogprob(text, token_bytes(self._tokenizer, token, text), max(logprob, LEAST))


def token_text(tokenizer: Any, token: int) -> str:
    """Text of a token within a text: some tokenizers drop the blank before the first token that they decode."""
    once = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if UNFINISHED in once:
        return once
    return tokenizer.decode([token, token], clean_up_tokenization_spaces=False)[len(once) :]


def token_bytes(tokenizer: Any, token: int, text: str) -> list[int] | None:
    """Bytes of a token, also if they are part of a character, in vocabularies of bytes; None if unknown."""
    if UNFINISHED not in text:
        return list(text.encode())
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str):
        return None
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's bytes
        return [int(piece[3:5], 16)]
    known = _bytes_of_characters()
    return [known[character] for character in piece] if all(character in known for character in piece) else None


@cache
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in bytes_to_unicode().items()}
