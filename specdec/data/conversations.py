"""Conversations: an entry's tokens through the target's chat template.

Owns which of a text's tokens the target wrote itself, and so may be learnt from.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from specdec.data.entries import FORMATS, cleaned, read_entries
from specdec.data.left_out import LeftOut
from specdec.data.messages import Asked, Message, asked_in, extra_of
from specdec.data.texts import Text


def read_texts(
    data: str | Path | Iterable[Any],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    marks: Sequence[int] = (),
    *,
    limit: int | None = None,
) -> Iterator[Text]:
    """Texts through the tokenizer's chat template, cut to `max_tokens`. A warning at the end names what was left out.

    Args:
        data: what `read_entries` reads, or the entries themselves (a `datasets.Dataset`, a list of dictionaries).
        marks: see `encode`.
        limit: of the texts that can be learnt from, take the first so many.

    Raises:
        ValueError: a file cannot be read, or nothing in it can be learnt from.
    """
    left_out = LeftOut("texts")
    count = kept = cut = lost = marked = 0
    for place, entry in read_entries(data):
        count += 1
        try:
            whole = encode(cleaned(entry), tokenizer, marks)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            left_out.add(place, error)
            continue
        text = Text(whole.ids[:max_tokens], whole.learn[:max_tokens])
        if bool(text.learn[2:].any()):  # the first token that a head can draft is the third
            kept += 1
            cut += len(whole.ids) > max_tokens
            lost += int(whole.learn[max_tokens:].sum())
            marked += bool(_marked(text.ids, marks).any())
            yield text
            if kept == limit:
                break
        elif len(whole.ids) == 0:
            left_out.add(place, "the tokenizer makes no token of it")
        else:
            left_out.add(
                place,
                f"within {max_tokens} tokens it holds nothing that the target wrote, or the chat template shows its "
                "answers differently than they were given",
            )
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
    left_out.settle(kept)


def encode(entry: Any, tokenizer: PreTrainedTokenizerBase, marks: Sequence[int] = ()) -> Text:
    """One entry of a training file.

    Args:
        marks: tokens that stand in the place of pictures, see `pictures.marks_of`: they are never learnt.
    """
    text = _encoded(entry, tokenizer, marks)
    return Text(text.ids, text.learn & ~_marked(text.ids, marks))


def _marked(ids: Tensor, marks: Sequence[int]) -> Tensor:
    """(T,) bool: which tokens are marks."""
    return torch.isin(ids, torch.tensor(list(marks), dtype=ids.dtype))


def _encoded(entry: Any, tokenizer: PreTrainedTokenizerBase, marks: Sequence[int]) -> Text:
    if not isinstance(entry, dict):
        raise ValueError(f"expected {FORMATS}")
    for name in ("text", "prompt", "response"):
        if not isinstance(entry.get(name, ""), str):
            raise ValueError(f"{name} must be a string, got {entry[name]!r}")
    if "text" in entry:
        ids = tokenizer(entry["text"])["input_ids"]
        return _text(ids, [True] * len(ids))
    if "response" in entry:
        if "prompt" not in entry:
            raise ValueError("a response without its prompt")
        question = Asked([{"role": "user", "content": entry["prompt"]}], extra_of(entry))
        prompt = encode_prompt(question.messages, tokenizer, **question.template)
        answer = tokenizer(entry["response"], add_special_tokens=False)["input_ids"]
        if entry.get("finish") != "length" and tokenizer.eos_token_id is not None:
            answer = [*answer, tokenizer.eos_token_id]
        if not answer:
            raise ValueError("the response is empty")
        return _text(prompt + answer, [False] * len(prompt) + [True] * len(answer))
    asked, cut = asked_in(entry), entry.get("finish") == "length"
    if tokenizer.chat_template is None and [message["role"] for message in asked.messages] == ["user", "assistant"]:
        prompt, response = (message["content"] for message in asked.messages)
        return _encoded({"prompt": prompt, "response": response, "finish": entry.get("finish")}, tokenizer, marks)
    text = _conversation(asked, tokenizer, cut)
    if asked.shows and not bool(_marked(text.ids, marks).any()):
        raise ValueError(
            "the conversation shows pictures, films or sounds, and the chat template puts no placeholder of the "
            "target's in their place: it is for text alone"
        )
    return text


def _conversation(asked: Asked, tokenizer: PreTrainedTokenizerBase, cut: bool) -> Text:
    """All answers are learnt from that stand in the conversation as they stood when they were given.

    Where each lies is found by encoding the conversation up to it. A template may show earlier answers in another way
    (without their thinking, say): those are not what the target wrote, and not learnt from. Nor is the end token of a
    last answer that was cut off.
    """
    messages, template = asked.messages, asked.template
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("the conversation has no answer: no message of the assistant's to learn from")
    ids = _rendered(messages[: answers[-1] + 1], tokenizer, False, **template)
    learn = [False] * len(ids)
    for i in answers:
        if i == 0:  # nothing was asked
            continue
        before = _rendered(messages[:i], tokenizer, True, **template)
        after = _rendered(messages[: i + 1], tokenizer, False, **template)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            continue
        start, end = len(before), len(after)
        while end > start and tokenizer.eos_token_id in ids[start:end] and ids[end - 1] != tokenizer.eos_token_id:
            end -= 1  # what the template adds behind the end token is not the target's
        learn[start:end] = [True] * (end - start)
        if cut and i == answers[-1] and end > start and ids[end - 1] == tokenizer.eos_token_id:
            learn[end - 1] = False
    return _text(ids, learn)


def encode_prompt(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **template: Any) -> list[int]:
    """A conversation up to where the target is to answer. template: arguments of the chat template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(messages[-1]["content"])["input_ids"])
    return _rendered(messages, tokenizer, True, **template)


def _rendered(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, generation: bool, **template: Any
) -> list[int]:
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template: give prompt and response, or plain text")
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=generation, return_dict=True, **template
        )
    except (TemplateError, TypeError) as error:  # TypeError: a template for strings, and a content in parts
        raise ValueError(f"the conversation does not fit the chat template: {error}") from error
    return list(encoded["input_ids"])


def _text(ids: Sequence[int], learn: Sequence[bool]) -> Text:
    return Text(torch.tensor(list(ids), dtype=torch.long), torch.tensor(list(learn), dtype=torch.bool))


def context_of(config: PretrainedConfig) -> int:
    """Tokens that a target can read; no bound where its config names none."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
