"""`Translation`: tables between the vocabularies of two tokenizers.

Two tokens are the same if they stand for the same bytes, however their tokenizers write them. Byte-level BPE writes
each byte as a letter; SentencePiece has a mark for the space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

SPACE = "\u2581"  # SentencePiece's mark
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Translation:
    """Tables from a target's tokens to its draft model's, and back for shared tokens.

    Attributes:
        shared: (2, K) int64, ids of shared tokens: the target's in rising order, and the draft's.
        spelled: for each target id, the draft's ids that spell it, always at least one.
    """

    shared: Tensor
    spelled: Sequence[tuple[int, ...]]

    @classmethod
    def between(cls, target: Any, draft: Any, target_size: int, draft_size: int) -> Translation:
        """Build the tables from two tokenizers and their models' vocabulary sizes.

        Special tokens are shared if their names are equal. Other special tokens are spelled like text.
        """
        theirs, ours = pieces(target), pieces(draft)
        ours = {token: piece for token, piece in ours.items() if token < draft_size}
        by_bytes: dict[bytes | str, int] = {}
        for token, piece in sorted(ours.items()):
            by_bytes.setdefault(piece, token)
        pairs = [
            (token, by_bytes[piece])
            for token, piece in sorted(theirs.items())
            if token < target_size and piece in by_bytes
        ]
        plain = {piece: token for piece, token in by_bytes.items() if isinstance(piece, bytes)}
        longest = max(map(len, plain), default=0)
        spelled: list[tuple[int, ...]] = [()] * target_size
        for token, piece in theirs.items():
            if token < target_size:
                text = piece.encode() if isinstance(piece, str) else piece
                same = by_bytes.get(piece)
                spelled[token] = (same,) if same is not None else _spelled(text, plain, longest)
        anything = (min(by_bytes.values(), default=0),)  # replaces tokens that cannot be spelled
        table = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T.contiguous()
        return cls(table, [word or anything for word in spelled])


def pieces(tokenizer: Any) -> dict[int, bytes | str]:
    """The bytes that each token stands for, by id; special tokens have their name instead."""
    special = {int(token) for token in getattr(tokenizer, "all_special_ids", ())}
    added = {int(token) for token in getattr(tokenizer, "added_tokens_decoder", {})}
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    letters = _letters() if _is_byte_level(vocabulary) else None
    found: dict[int, bytes | str] = {}
    for name, token in vocabulary.items():
        if token in special or token in added:
            found[token] = name
        elif letters is not None:
            found[token] = bytes(letters[c] for c in name) if all(c in letters for c in name) else name.encode()
        elif byte := BYTE.fullmatch(name):
            found[token] = bytes.fromhex(byte[1])
        else:
            found[token] = name.replace(SPACE, " ").encode()
    return found


def _is_byte_level(vocabulary: Mapping[str, int]) -> bool:
    """Detect byte-level BPE by its letter for the space (byte 32); SentencePiece has a mark of its own."""
    return "\u0120" in vocabulary and SPACE not in vocabulary


@cache
def _letters() -> dict[str, int]:
    """The byte that each letter of byte-level BPE stands for (GPT-2's table). Printable bytes are themselves."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _spelled(text: bytes, plain: Mapping[bytes, int], longest: int) -> tuple[int, ...]:
    """Spell the text with the longest tokens, greedily from its start. Bytes that no token starts with are skipped."""
    out: list[int] = []
    start = 0
    while start < len(text):
        for end in range(min(len(text), start + longest), start, -1):
            if text[start:end] in plain:
                out.append(plain[text[start:end]])
                break
        else:
            end = start + 1
        start = end
    return tuple(out)
