"""An entry's messages, and what it asks. Imports no torch: commands read their files before they load a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec.data.entries import FORMATS, cleaned, opened, read_entries
from specdec.data.skipped import LeftOut

PROMPT_FORMATS = '{"prompt": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'
ROLES = {role: role for role in ("user", "assistant", "system", "tool")}
# Other names of the same roles: ShareGPT's, OpenAI's new one for "system" and its old one for "tool".
ROLES |= {"human": "user", "gpt": "assistant", "developer": "system", "function": "tool"}
KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # of a message, beside its role and content
CALL = "function_call"  # OpenAI's old name for a message's only call
TOOLS, SWITCHES = "tools", "chat_template_kwargs"  # of an entry, beside its messages

Message = dict[str, Any]


@dataclass
class Asked:
    """A conversation, and what its chat template is told beside it.

    Attributes:
        messages: each with its role and content, and what `KEPT` names. A content is a string, or, where it shows more
            than text, a list of parts: `{"type": "image"}`, `{"type": "text", "text": ...}`.
        extra: what stands in the entry beside them: the `tools` it may call, and `chat_template_kwargs`, say
            `{"enable_thinking": False}`.
        place: where the entry stood.
    """

    messages: list[Message]
    extra: dict[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def shows(self) -> bool:
        """Is there anything beside text?"""
        return any(not isinstance(message["content"], str) for message in self.messages)

    @property
    def template(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        tools = {TOOLS: self.extra[TOOLS]} if TOOLS in self.extra else {}
        return self.extra.get(SWITCHES, {}) | tools


def read_prompts(data: str | Path | Iterable[Any], left_out: LeftOut | None = None) -> Iterator[tuple[int, Asked]]:
    """Entries that ask something, prompts or conversations, each with its number among all entries, from 0.

    Args:
        data: what `read_entries` reads, but of a `.txt` every line is a prompt.
        left_out: takes the entries that ask nothing. None: a warning names them at the end, and it is an error if no
            other is left.
    """
    if isinstance(data, (str, Path)) and Path(data).suffix == ".txt":
        entries = _prompts_of_lines(Path(data))
    else:
        entries = read_entries(data, PROMPT_FORMATS)
    useless, left = left_out or LeftOut("prompts"), 0
    for number, (place, entry) in enumerate(entries):
        try:
            asked = _question(entry)
        except ValueError as error:
            useless.add(place, error)
            continue
        left += 1
        asked.place = place
        yield number, asked
    if left_out is None:
        useless.settle(left)


def _question(entry: Any) -> Asked:
    asked = asked_in(cleaned(entry), PROMPT_FORMATS)
    if asked.shows:
        raise ValueError(
            "the conversation shows pictures, films or sounds, and would be answered without them: only texts to train "
            "on may show some"
        )
    if not any(message["role"] == "user" and message["content"].strip() for message in asked.messages):
        raise ValueError("the conversation asks nothing: it needs a message of the user's that is not empty")
    return asked


def questions(path: Path) -> Iterator[Asked]:
    """Conversations up to where the target is to answer, of what `regenerate` reads."""
    for _, asked in read_prompts(path):
        last = max(i for i, message in enumerate(asked.messages) if message["role"] in ("user", "tool"))
        yield replace(asked, messages=asked.messages[: last + 1])


def first_questions(path: Path, limit: int) -> tuple[list[Asked], int]:
    """The first `limit` of them, and how many there are; those further down that ask nothing are said, too."""
    kept, count = [], 0
    for count, asked in enumerate(questions(path), start=1):
        if count <= limit:
            kept.append(asked)
    return kept, count


def _prompts_of_lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    with opened(path) as file:
        for number, line in enumerate((line for line in file if line.strip()), start=1):
            yield f"{path}, prompt {number}", {"prompt": line.rstrip("\n")}
    if number == 0:
        raise ValueError(f"{path} is empty: one prompt per line is expected")


def asked_in(entry: Any, formats: str = FORMATS) -> Asked:
    """An entry that is a conversation, or a prompt alone; `formats`: what an error asks for."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected {formats}")
    messages = entry.get("messages") or entry.get("conversations")
    if not messages and "prompt" in entry:
        messages = [{"role": "user", "content": entry["prompt"]}]
    if not messages:
        empty = next((f"{name} is empty: " for name in ("messages", "conversations") if name in entry), "")
        raise ValueError(f"{empty}expected {formats}, found {', '.join(map(repr, entry)) or 'nothing'}")
    if not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages must be a list, got {messages!r}")
    return Asked([_message(message) for message in messages], extra_of(entry))


def extra_of(entry: dict[str, Any]) -> dict[str, Any]:
    """What an entry's chat template is told beside its messages, see `Asked`."""
    extra = {name: entry[name] for name in (TOOLS, SWITCHES) if entry.get(name)}
    for name, kind, example in ((TOOLS, list, "a list"), (SWITCHES, dict, 'an object, say {"enable_thinking": false}')):
        if not isinstance(extra.get(name, kind()), kind):
            raise ValueError(f"{name} must be {example}, got {extra[name]!r}")
    return extra


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"a message needs a role and content, got {message!r}")
    role = ROLES.get(str(message.get("role") or message.get("from")))
    content = message.get("value") if message.get("content") is None else message["content"]
    kept = {name: message[name] for name in KEPT if message.get(name)}
    if message.get(CALL) and "tool_calls" not in kept:
        kept["tool_calls"] = [{"type": "function", "function": message[CALL]}]
    if content is None and "tool_calls" in kept:
        content = ""
    content = _joined(content)
    if role is None or content is None:
        names = ", ".join(sorted(ROLES))
        raise ValueError(
            f"a message needs a role ({names}) and as its content a string, or a list of parts that have a type, got "
            f"{message}"
        )
    return {"role": role, "content": content} | kept


def _joined(content: Any) -> str | list[dict[str, Any]] | None:
    """Parts that are text alone as one string, which every chat template takes; None for what is no content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        return None
    texts = [part.get("text") for part in content if part["type"] == "text"]
    if not all(isinstance(text, str) for text in texts):
        return None
    if len(texts) == len(content):
        return "".join(texts)
    return [{name: value for name, value in part.items() if value is not None} for part in content]
