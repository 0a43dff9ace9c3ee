"""An entry's messages, and what it asks. Imports no torch: commands read their files before they load a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specdec.data.entries import FORMATS, read_entries

PROMPT_FORMATS = '{"prompt": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


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


def questions(path: Path) -> Iterator[list[dict[str, str]]]:
    """Messages up to where the target is to answer, of what `regenerate` reads."""
    for _, messages in read_prompts(path):
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        yield messages[: last + 1]


def first_questions(path: Path, limit: int) -> tuple[list[list[dict[str, str]]], int]:
    """The first `limit` of them, and how many there are; a broken line further down is said, too."""
    kept, count = [], 0
    for count, messages in enumerate(questions(path), start=1):
        if count <= limit:
            kept.append(messages)
    return kept, count


def _prompts_of_lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate((line for line in file if line.strip()), start=1):
            yield f"{path}, prompt {number}", {"prompt": line.rstrip("\n")}
    if number == 0:
        raise ValueError(f"{path} is empty: one prompt per line is expected")


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


def _message(message: dict[str, str]) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"a message needs a role and content, got {message!r}")
    role = ROLES.get(str(message.get("role") or message.get("from")))
    content = message.get("content") if "content" in message else message.get("value")
    if role is None or not isinstance(content, str):
        names = ", ".join(sorted(ROLES))
        raise ValueError(f"a message needs a role ({names}) and a string as its content, got {message}")
    return {"role": role, "content": content}
