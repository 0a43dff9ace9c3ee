"""Conversations: turns entries into token ids, recorded ones or those of the target's chat template.

Decides which tokens belong to answers. Only these are trained on.
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
from specdec.data.messages import Conversation, Message, extra_of, parse_conversation
from specdec.data.sequences import SEQUENCES, TOKENIZER, TokenSequence, as_text, extend, fingerprint, recorded, texts_of
from specdec.data.skipped import Skipped
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
    """Yield texts in the tokenizer's chat template, cut to `max_tokens`; an entry may give several.

    Warnings at the end list what was left out.

    Args:
        data: any input of `read_entries`: a file, or the entries (a `datasets.Dataset`, a list of dictionaries).
        tokenizer: tokenizer of the target.
        max_tokens: maximum length of a text.
        marks: see `Encoder`.
        ends: see `Encoder`.
        limit: maximum number of texts, counting only those that can be trained on.

    Raises:
        ValueError: a file cannot be read, or none of its texts can be trained on.
    """
    encode, left_out = Encoder(tokenizer, marks, ends), Skipped("texts")
    kept = cut = lost = marked = 0
    for place, entry in read_entries(data):
        try:
            texts = encode(cleaned(entry))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            left_out.add(place, error)
            continue
        if not texts:
            left_out.add(place, "the chat template renders its answers differently from how they were written")
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
                left_out.add(place, "the tokenizer returns no tokens for it")
            else:
                left_out.add(place, f"its first {max_tokens} tokens contain nothing to train on")
        if kept == limit:
            break
    count = kept + left_out.count
    if marked:
        warnings.warn(
            f"{marked} of {count} texts contain images, videos or audio, which are not read: the target sees only "
            "their placeholders, as one token each, and the head is trained on the text after them. Placeholders are "
            "not trained on"
        )
    if cut:
        warnings.warn(
            f"{cut} of {count} texts are longer than {max_tokens} tokens and were cut, which lost {lost} tokens to "
            "train on: use a larger --length to keep them"
        )
    for message in encode.warnings():
        warnings.warn(message)
    left_out.check_and_warn(kept)


class Encoder:
    """Turns entries of training files into texts, and counts what it finds.

    Args:
        tokenizer: tokenizer of the target.
        marks: placeholder tokens of images, videos and audio, see `introspection.marks_of`; never trained on.
        ends: end-of-text tokens from the target's generation config, in addition to the tokenizer's end token.

    Attributes:
        answers: number of answers in conversations.
        changed: answers that the template renders differently from how they were written; not trained on.
        trimmed: answers that the template renders without surrounding whitespace.
        recorded: number of conversations with token ids.
        foreign: conversations with token ids of another tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marks: Sequence[int] = (), ends: Sequence[int] = ()):
        self.tokenizer, self.marks = tokenizer, marks
        self.answers = self.changed = self.trimmed = self.recorded = self.foreign = 0
        self._template = ChatTemplate(tokenizer, ends)

    def __call__(self, entry: Any) -> list[Text]:
        """Return the texts of one entry: several if the template changes earlier answers in later turns."""
        return [Text(text.ids, text.learn & ~_marked(text.ids, self.marks)) for text in self._texts(entry)]

    def warnings(self) -> Iterator[str]:
        """Yield warnings about the entries so far."""
        if self.changed:
            yield (
                f"{self.changed} of {self.answers} answers in conversations are not trained on: the chat template "
                "renders them differently from how they were written (for example without their thinking), or from how "
                "its prompt begins them. `specdec regenerate` records token ids, which need no template; "
                '{"prompt": ..., "response": ...} is used verbatim'
            )
        if self.trimmed:
            yield (
                f"{self.trimmed} of {self.answers} answers in conversations are trained on without some whitespace: "
                "the chat template removes it"
            )
        if self.foreign:
            yield (
                f"{self.foreign} of {self.recorded} conversations with token ids were written with another tokenizer: "
                "their messages are read through this one's chat template. For a better head, let its own target "
                "answer the prompts, using `specdec regenerate`"
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
                raise ValueError(f"the token ids belong to another tokenizer, and {error}") from error
        return self._messages(entry)

    def _messages(self, entry: dict[str, Any]) -> list[Text]:
        conversation, cut = parse_conversation(entry), entry.get("finish") == "length"
        roles = [message["role"] for message in conversation.messages]
        if self.tokenizer.chat_template is None and roles == ["user", "assistant"]:
            prompt, response = (message["content"] for message in conversation.messages)
            return self._pair({"prompt": prompt, "response": response, "finish": entry.get("finish")})
        texts = self._conversation(conversation, cut)
        read = any(bool(_marked(text.ids, self.marks).any()) for text in texts)
        if texts and conversation.is_multimodal and not read:
            raise ValueError(
                "the conversation contains images, videos or audio, but the chat template inserts none of the target's "
                "placeholders for them: it supports text only"
            )
        return texts

    def _pair(self, entry: dict[str, Any]) -> list[Text]:
        """Encode a prompt and its verbatim response."""
        if "prompt" not in entry:
            raise ValueError("found a response without its prompt")
        question = Conversation([{"role": "user", "content": entry["prompt"]}], extra_of(entry))
        prompt = encode_prompt(question.messages, self.tokenizer, **question.template)
        answer = self._template.response(entry["response"], entry.get("finish") == "length")
        if not answer:
            raise ValueError("the response is empty")
        return [as_text(prompt + answer, [0] * len(prompt) + [1] * len(answer))]

    def _conversation(self, conversation: Conversation, cut: bool) -> list[Text]:
        """Encode each answer as the template renders it right after it was given.

        A template may change an answer in later turns (for example remove its thinking): the next answer then begins
        another text. An answer that is changed at once is not the target's text, and is not trained on.
        """
        messages = conversation.messages
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise ValueError("the conversation has no answer: it needs a message with the role assistant")
        sequences: list[TokenSequence] = []
        for i in filter(None, answers):  # before message 0 nothing was asked
            self.answers += 1
            cut_off = cut and i == answers[-1]
            answer = self._template.answer(messages[: i + 1], cut_off, **conversation.template)
            if answer is None:
                self.changed += 1
                continue
            self.trimmed += answer.trimmed
            extend(sequences, answer.prompt, answer.ids)
        return texts_of(sequences)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.tokenizer)


def _marked(ids: Tensor, marks: Sequence[int]) -> Tensor:
    """Mask (T,) bool of the tokens in `marks`."""
    return torch.isin(ids, torch.tensor(list(marks), dtype=ids.dtype))


def encode_prompt(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **template: Any) -> list[int]:
    """Tokenize a conversation up to where the target answers. template: arguments of the chat template.

    Raises:
        ValueError: several messages, but no chat template; or the template refuses them.
    """
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            raise ValueError("it has several messages, but the tokenizer has no chat template")
        return list(tokenizer(messages[-1]["content"])["input_ids"])
    return list(tokenizer(rendered(messages, tokenizer, True, **template), add_special_tokens=False)["input_ids"])


def context_of(config: PretrainedConfig) -> int:
    """Maximum number of tokens that a target can read; `sys.maxsize` if its config names none."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
