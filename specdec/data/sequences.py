"""Recorded token ids of a target's answers: the fields `sequences` and `tokenizer` of an entry in a file of answers.

A conversation is one sequence as long as the chat template renders earlier answers as they were written. If it changes
one, the next answer begins another sequence.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec.data.texts import Text

SEQUENCES, TOKENIZER = "sequences", "tokenizer"
IDS, MASK = "input_ids", "loss_mask"  # fields of a sequence

TokenSequence = dict[str, list[int]]


def extend(sequences: list[TokenSequence], prompt: list[int], answer: list[int]) -> None:
    """Append a prompt and its answer to the last sequence if the prompt begins with it, otherwise as a new sequence."""
    before: TokenSequence = {IDS: [], MASK: []}
    if sequences and prompt[: len(sequences[-1][IDS])] == sequences[-1][IDS]:
        before = sequences.pop()
    mask = before[MASK] + [0] * (len(prompt) - len(before[IDS])) + [1] * len(answer)
    sequences.append({IDS: prompt + answer, MASK: mask})


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary, to detect tokenizers with different token ids."""
    content = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def texts_of(sequences: list[TokenSequence]) -> list[Text]:
    return [as_text(sequence[IDS], sequence[MASK]) for sequence in sequences]


def as_text(ids: list[int], learn: list[int]) -> Text:
    return Text(torch.tensor(ids, dtype=torch.long), torch.tensor(learn, dtype=torch.bool))


def recorded(sequences: Any) -> list[Text]:
    """Convert the sequences of an entry to texts.

    Raises:
        ValueError: they do not have the format that `extend` writes.
    """
    fields = f"{SEQUENCES} must be a list of objects with {IDS}, the token ids, and {MASK}, a 0 or 1 for each"
    if not isinstance(sequences, list) or not all(isinstance(sequence, dict) for sequence in sequences):
        raise ValueError(f"{fields}, got {sequences!r:.80}")
    for sequence in sequences:
        ids, mask = sequence.get(IDS), sequence.get(MASK)
        whole = isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask) > 0
        if not whole or not all(type(i) is int and i >= 0 for i in ids) or not set(mask) <= {0, 1}:
            raise ValueError(f"{fields}, got {sequence!r:.80}")
    return texts_of(sequences)
