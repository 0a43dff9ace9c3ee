"""`Text`: what a head is trained on, and reading it from files.

Owns formats of training data and which of a text's tokens the target wrote itself, and so may be learnt from.
"""

from __future__ import annotations

import gzip
import json
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

FORMATS = (
    '{"prompt": ..., "response": ...}, {"messages": [{"role": ..., "content": ...}, ...]}, '
    '{"conversations": [{"from": ..., "value": ...}, ...]} or {"text": ...}'
)
PROMPT_FORMATS = '{"prompt": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Text:
    """ids: (T,) int64. learn: (T,) bool, the tokens that are the target's own."""

    ids: Tensor
    learn: Tensor


def read_texts(data: str | Path | Iterable[Any], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Text]:
    """Texts through the tokenizer's chat template, cut to `max_tokens`.

    Args:
        data: what `read_entries` reads, or the entries themselves (a `datasets.Dataset`, a list of dictionaries).
    """
    count = kept = cut = lost = 0
    for place, entry in read_entries(data):
        count += 1
        try:
            whole = encode(entry, tokenizer)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{place}: {error}") from error
        text = Text(whole.ids[:max_tokens], whole.learn[:max_tokens])
        if bool(text.learn[2:].any()):  # the first token that a head can draft is the third
            kept += 1
            cut += len(whole.ids) > max_tokens
            lost += int(whole.learn[max_tokens:].sum())
            yield text
    if cut:
        warnings.warn(
            f"{cut} of {count} texts are longer than {max_tokens} tokens and were cut: {lost} tokens that could be "
            "learnt are not. A larger --length takes them"
        )
    if kept < count:
        warnings.warn(
            f"{count - kept} of {count} texts were left out: within {max_tokens} tokens they hold nothing that the "
            "target wrote, or the chat template shows their answers differently than they were given"
        )


def end_to_end(texts: Sequence[Text]) -> dict[str, Tensor]:
    """Texts as they lie in files: ids and learn flags of all, one behind the other, and each one's length."""
    return {
        "ids": torch.cat([text.ids for text in texts]),
        "learn": torch.cat([text.learn for text in texts]),
        "lengths": torch.tensor([len(text.ids) for text in texts]),
    }


def keep(texts: Sequence[Text], file: Path) -> None:
    """Write texts, whole or not at all."""
    partial = file.with_suffix(".part")
    save_file(end_to_end(texts), partial)
    partial.rename(file)


def kept_texts(file: Path) -> list[Text]:
    """What `keep` wrote."""
    found = load_file(file)
    lengths = found["lengths"].tolist()
    parts = zip(found["ids"].split(lengths), found["learn"].split(lengths), strict=True)
    return [Text(ids, learn) for ids, learn in parts]


def context_of(config: PretrainedConfig) -> int:
    """Tokens that a target can read; no bound where its config names none."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize


def read_entries(data: str | Path | Iterable[Any], formats: str = FORMATS) -> Iterator[tuple[str, Any]]:
    """Entries, and where each stood: of a JSONL file (also gzipped), a plain text (`.txt`, a text between blank lines),
    a folder written by `datasets.Dataset.save_to_disk`, or anything that yields them.

    Args:
        formats: what an error asks for.
    """
    entries: Iterator[tuple[str, Any]]
    if not isinstance(data, (str, Path)):
        name, entries = "the data", ((f"entry {number}", entry) for number, entry in enumerate(data))
    elif Path(data).is_dir():
        name, entries = str(data), _dataset(Path(data))
    elif Path(data).suffix == ".txt":
        parts = Path(data).read_text(encoding="utf-8").split("\n\n")
        name, entries = str(data), ((f"{data}", {"text": part.strip()}) for part in parts if part.strip())
    else:
        name, entries = str(data), _lines(Path(data))
    count = 0
    for count, (place, entry) in enumerate(entries, start=1):  # noqa: B007
        yield place, entry
    if count == 0:
        raise ValueError(f"{name} is empty: one JSON object per line is expected, {formats}")


def read_prompts(data: str | Path | Iterable[Any]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """The messages of entries that ask something, prompts or conversations, and where each stood.

    Args:
        data: what `read_entries` reads, but of a `.txt` every line is a prompt.
    """
    if isinstance(data, (str, Path)) and Path(data).suffix == ".txt":
        entries = _prompts_of_lines(Path(data))
    else:
        entries = read_entries(data, PROMPT_FORMATS)
    for place, entry in entries:
        try:
            messages = messages_of(entry, PROMPT_FORMATS)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if not any(message["role"] == "user" for message in messages):
            raise ValueError(f"{place}: the conversation asks nothing: it needs a message of the user's")
        yield place, messages


def _prompts_of_lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate((line for line in file if line.strip()), start=1):
            yield f"{path}, prompt {number}", {"prompt": line.rstrip("\n")}
    if number == 0:
        raise ValueError(f"{path} is empty: one prompt per line is expected")


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        with open_file(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}") from error
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        packed = " packed by gzip, as its name says, and whole" if path.suffix == ".gz" else ""
        raise ValueError(f"{path} is not text in UTF-8{packed}: {error}") from error


def _dataset(path: Path) -> Iterator[tuple[str, Any]]:
    if (path / "config.json").exists():
        raise ValueError(f"{path} is a model's folder, not texts: the target comes first, then the texts")
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ValueError(f"{path} is a folder, which `pip install datasets` is needed to read") from error
    try:
        rows = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is a folder, but none that datasets' save_to_disk wrote") from error
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


def encode(entry: Any, tokenizer: PreTrainedTokenizerBase) -> Text:
    """One entry of a training file."""
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
        prompt = encode_prompt([{"role": "user", "content": entry["prompt"]}], tokenizer)
        answer = tokenizer(entry["response"], add_special_tokens=False)["input_ids"]
        if entry.get("finish") != "length" and tokenizer.eos_token_id is not None:
            answer = [*answer, tokenizer.eos_token_id]
        if not answer:
            raise ValueError("the response is empty")
        return _text(prompt + answer, [False] * len(prompt) + [True] * len(answer))
    messages, cut = messages_of(entry), entry.get("finish") == "length"
    if tokenizer.chat_template is None and [message["role"] for message in messages] == ["user", "assistant"]:
        plain = {"prompt": messages[0]["content"], "response": messages[1]["content"], "finish": entry.get("finish")}
        return encode(plain, tokenizer)
    return _conversation(messages, tokenizer, cut)


def messages_of(entry: Any, formats: str = FORMATS) -> list[dict[str, str]]:
    """The messages of an entry that is a conversation, or a prompt alone; `formats`: what an error asks for."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected {formats}")
    messages = entry.get("messages") or entry.get("conversations")
    if not messages and "prompt" in entry:
        messages = [{"role": "user", "content": entry["prompt"]}]
    if not messages:
        raise ValueError(f"expected {formats}, found {', '.join(map(repr, entry)) or 'nothing'}")
    if not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages must be a list, got {messages!r}")
    return [_message(message) for message in messages]


def _conversation(messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, cut: bool) -> Text:
    """All answers are learnt from that stand in the conversation as they stood when they were given.

    Where each lies is found by encoding the conversation up to it. A template may show earlier answers in another way
    (without their thinking, say): those are not what the target wrote, and not learnt from. Nor is the end token of a
    last answer that was cut off.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("the conversation has no answer: no message of the assistant's to learn from")
    ids = _rendered(messages[: answers[-1] + 1], tokenizer, False)
    learn = [False] * len(ids)
    for i in answers:
        if i == 0:  # nothing was asked
            continue
        before, after = _rendered(messages[:i], tokenizer, True), _rendered(messages[: i + 1], tokenizer, False)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            continue
        start, end = len(before), len(after)
        while end > start and tokenizer.eos_token_id in ids[start:end] and ids[end - 1] != tokenizer.eos_token_id:
            end -= 1  # what the template adds behind the end token is not the target's
        learn[start:end] = [True] * (end - start)
        if cut and i == answers[-1] and end > start and ids[end - 1] == tokenizer.eos_token_id:
            learn[end - 1] = False
    return _text(ids, learn)


def _message(message: dict[str, str]) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"a message needs a role and content, got {message!r}")
    role = ROLES.get(str(message.get("role") or message.get("from")))
    content = message.get("content") if "content" in message else message.get("value")
    if role is None or not isinstance(content, str):
        names = ", ".join(sorted(ROLES))
        raise ValueError(f"a message needs a role ({names}) and a string as its content, got {message}")
    return {"role": role, "content": content}


def encode_prompt(messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A conversation up to where the target is to answer."""
    if tokenizer.chat_template is None:
        return list(tokenizer(messages[-1]["content"])["input_ids"])
    return _rendered(messages, tokenizer, True)


def _rendered(messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, generation: bool) -> list[int]:
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template: give prompt and response, or plain text")
    try:
        encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=generation, return_dict=True)
    except TemplateError as error:
        raise ValueError(f"the conversation does not fit the chat template: {error}") from error
    return list(encoded["input_ids"])


def _text(ids: Sequence[int], learn: Sequence[bool]) -> Text:
    return Text(torch.tensor(list(ids)), torch.tensor(list(learn)))
