"""Conversations: an entry's tokens, as the target wrote them or through its chat template.

Owns which of a text's tokens the target wrote itself, and so may be learnt from.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from specdec.data.chat_template import ChatTemplate, rendered
from specdec.data.entries import FORMATS, cleaned, read_entries
from specdec.data.messages import Asked, Message, asked_in, extra_of
from specdec.data.sequences import SEQUENCES, TOKENIZER, TokenSequence, as_text, extend, fingerprint, recorded, texts_of
from specdec.data.skipped import LeftOut
from specdec.data.texts import Text


def read_texts(
    data: str | Path | Iterable[Any],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    marks: Sequence[int] = (),
    ends: Sequence[int] = (),
    *,
    limit: int | None = None,
) -> Iterator[Text]:
    """Texts through the tokenizer's chat template, cut to `max_tokens`. An entry may hold several. Warnings at the end
    say what was left out.

    Args:
        data: what `read_entries` reads, or the entries themselves (a `datasets.Dataset`, a list of dictionaries).
        marks, ends: see `Encoder`.
        limit: of the texts that can be learnt from, take the first so many.

    Raises:
        ValueError: a file cannot be read, or nothing in it can be learnt from.
    """
    encode, left_out = Encoder(tokenizer, marks, ends), LeftOut("texts")
    kept = cut = lost = marked = 0
    for place, entry in read_entries(data):
        try:
            texts = encode(cleaned(entry))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            left_out.add(place, error)
            continue
        if not texts:
            left_out.add(place, "the chat template shows its answers otherwise than they were written")
        for whole in texts:
            if kept == limit:
                break
            text = Text(whole.ids[:max_tokens], whole.learn[:max_tokens])
            if bool(text.learn[2:].any()):  # the first token that a head can draft is the third
                kept += 1
                cut += len(whole.ids) > max_tokens
                lost += int(whole.learn[max_tokens:].sum())
                marked += bool(_marked(text.ids, marks).any())
                yield text
            elif len(whole.ids) == 0:
                left_out.add(place, "the tokenizer makes no token of it")
            else:
                left_out.add(place, f"within {max_tokens} tokens it holds nothing that the target wrote")
        if kept == limit:
            break
    count = kept + left_out.count
    if marked:
        warnings.warn(
            f"{marked} of {count} texts show pictures, films or sounds, which are not read: the target sees their "
            "placeholders alone, as one token each, and the head learns what it writes behind these. No placeholder is "
            "learnt"
        )
    if cut:
        warnings.warn(
            f"{cut} of {count} texts are longer than {max_tokens} tokens and were cut: {lost} tokens that could be "
            "learnt are not. A larger --length takes them"
        )
    for message in encode.warnings():
        warnings.warn(message)
    left_out.settle(kept)


class Encoder:
    """Makes texts of the entries of training files, and counts what it makes them of.

    Args:
        marks: tokens that stand in the place of pictures, see `pictures.marks_of`: they are never learnt.
        ends: tokens that end the target's texts, by its generation config; the tokenizer's end token is one, too.

    Attributes:
        answers: found in conversations. otherwise: of these, shown otherwise than they were written, and not learnt.
        trimmed: shown without blanks around them. recorded: conversations with token ids. foreign: of these, those
            with the ids of another tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marks: Sequence[int] = (), ends: Sequence[int] = ()):
        self.tokenizer, self.marks = tokenizer, marks
        self.answers = self.otherwise = self.trimmed = self.recorded = self.foreign = 0
        self._template = ChatTemplate(tokenizer, ends)

    def __call__(self, entry: Any) -> list[Text]:
        """The texts of one entry: several where the chat template shows answers otherwise once more is asked."""
        return [Text(text.ids, text.learn & ~_marked(text.ids, self.marks)) for text in self._texts(entry)]

    def warnings(self) -> Iterator[str]:
        """What is to be said of the entries so far."""
        if self.otherwise:
            yield (
                f"{self.otherwise} of {self.answers} answers in conversations are not learnt: the chat template shows "
                "them otherwise than they were written (without their thinking, say), or than its prompt begins them. "
                '`specdec regenerate` keeps token ids, which need no template; {"prompt": ..., "response": ...} is '
                "learnt as it is written"
            )
        if self.trimmed:
            yield (
                f"{self.trimmed} of {self.answers} answers in conversations are learnt without blanks that they were "
                "written with: the chat template leaves these out"
            )
        if self.foreign:
            yield (
                f"{self.foreign} of {self.recorded} conversations with token ids were written with another tokenizer: "
                "their messages are read through this one's chat template. For a head, have its own target answer"
            )

    def _texts(self, entry: Any) -> list[Text]:
        if not isinstance(entry, dict):
            raise ValueError(f"expected {FORMATS}")
        for name in ("text", "prompt", "response"):
            if not isinstance(entry.get(name, ""), str):
                raise ValueError(f"{name} must be a string, got {entry[name]!r}")
        if "text" in entry:
            ids = self.tokenizer(entry["text"])["input_ids"]
            return [as_text(ids, [1] * len(ids))]
        if "response" in entry:
            return self._pair(entry)
        if entry.get(SEQUENCES):
            self.recorded += 1
            if entry.get(TOKENIZER) == self._fingerprint:
                return recorded(entry[SEQUENCES])
            self.foreign += 1
            try:
                return self._messages(entry)
            except ValueError as error:
                raise ValueError(f"the token ids are of another tokenizer, and {error}") from error
        return self._messages(entry)

    def _messages(self, entry: dict[str, Any]) -> list[Text]:
        asked, cut = asked_in(entry), entry.get("finish") == "length"
        roles = [message["role"] for message in asked.messages]
        if self.tokenizer.chat_template is None and roles == ["user", "assistant"]:
            prompt, response = (message["content"] for message in asked.messages)
            return self._pair({"prompt": prompt, "response": response, "finish": entry.get("finish")})
        texts = self._conversation(asked, cut)
        if texts and asked.shows and not any(bool(_marked(text.ids, self.marks).any()) for text in texts):
            raise ValueError(
                "the conversation shows pictures, films or sounds, and the chat template puts no placeholder of the "
                "target's in their place: it is for text alone"
            )
        return texts

    def _pair(self, entry: dict[str, Any]) -> list[Text]:
        """A prompt, and the response as it was written."""
        if "prompt" not in entry:
            raise ValueError("a response without its prompt")
        question = Asked([{"role": "user", "content": entry["prompt"]}], extra_of(entry))
        prompt = encode_prompt(question.messages, self.tokenizer, **question.template)
        answer = self._template.response(entry["response"], entry.get("finish") == "length")
        if not answer:
            raise ValueError("the response is empty")
        return [as_text(prompt + answer, [0] * len(prompt) + [1] * len(answer))]

    def _conversation(self, asked: Asked, cut: bool) -> list[Text]:
        """Each answer as the template shows it when it is given, after all that was said before.

        A template may show it in another way once more is asked (without its thinking, say): then the next answer is
        in another text. What it shows otherwise at once is not what the target wrote, and not learnt from.
        """
        answers = [i for i, message in enumerate(asked.messages) if message["role"] == "assistant"]
        if not answers:
            raise ValueError("the conversation has no answer: no message of the assistant's to learn from")
        sequences: list[TokenSequence] = []
        for i in answers:
            if i == 0:  # nothing was asked
                continue
            self.answers += 1
            answer = self._template.answer(asked.messages[: i + 1], cut and i == answers[-1], **asked.template)
            if answer is None:
                self.otherwise += 1
                continue
            self.trimmed += answer.trimmed
            extend(sequences, answer.prompt, answer.ids)
        return texts_of(sequences)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.tokenizer)


def _marked(ids: Tensor, marks: Sequence[int]) -> Tensor:
    """(T,) bool: which tokens are marks."""
    return torch.isin(ids, torch.tensor(list(marks), dtype=ids.dtype))


def encode_prompt(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **template: Any) -> list[int]:
    """A conversation up to where the target is to answer. template: arguments of the chat template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(messages[-1]["content"])["input_ids"])
    return list(tokenizer(rendered(messages, tokenizer, True, **template), add_special_tokens=False)["input_ids"])


def context_of(config: PretrainedConfig) -> int:
    """Tokens that a target can read; no bound where its config names none."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
