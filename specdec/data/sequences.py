"""Answers as a target wrote them: token ids, and which of them are its own; beside a conversation in a file of answers.

Owns these fields of an entry: `sequences` and `tokenizer`. A conversation is one sequence as long as the chat template
shows each answer again as it was written; from there on the next answer is in a sequence of its own.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec.data.texts import Text

SEQUENCES, TOKENIZER = "sequences", "tokenizer"
IDS, MASK = "input_ids", "loss_mask"  # of a sequence

TokenSequence = dict[str, list[int]]


def extend(sequences: list[TokenSequence], prompt: list[int], answer: list[int]) -> None:
    """Add what a target read and wrote: to the last sequence if the prompt begins with that, or as another one."""
    before: TokenSequence = {IDS: [], MASK: []}
    if sequences and prompt[: len(sequences[-1][IDS])] == sequences[-1][IDS]:
        before = sequences.pop()
    mask = before[MASK] + [0] * (len(prompt) - len(before[IDS])) + [1] * len(answer)
    sequences.append({IDS: prompt + answer, MASK: mask})


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Tells apart tokenizers whose token ids mean different things."""
    content = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def texts_of(sequences: list[TokenSequence]) -> list[Text]:
    return [as_text(sequence[IDS], sequence[MASK]) for sequence in sequences]


def as_text(ids: list[int], learn: list[int]) -> Text:
    return Text(torch.tensor(ids, dtype=torch.long), torch.tensor(learn, dtype=torch.bool))


def recorded(sequences: Any) -> list[Text]:
    """The sequences of an entry as texts.

    Raises:
        ValueError: they are not as `extend` makes them.
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
