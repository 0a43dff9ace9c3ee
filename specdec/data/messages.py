"""Messages and prompts of entries. Imports no torch: commands read their files before they load a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from specdec.data.entries import FORMATS, cleaned, opened, read_entries
from specdec.data.skipped import Skipped

PROMPT_FORMATS = '{"prompt": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'
ROLES = {role: role for role in ("user", "assistant", "system", "tool")}
# Other names of the same roles: ShareGPT's, OpenAI's new name for "system" and its old name for "tool".
ROLES |= {"human": "user", "gpt": "assistant", "developer": "system", "function": "tool"}
MESSAGE_FIELDS = (
    "tool_calls",
    "tool_call_id",
    "name",
    "reasoning_content",
)  # fields of a message, besides its role and content
FUNCTION_CALL = "function_call"  # OpenAI's old name for a message's only call
TOOLS, SWITCHES = "tools", "chat_template_kwargs"  # fields of an entry, besides its messages

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A conversation and further arguments of its chat template.

    Attributes:
        messages: dictionaries with a role, a content and the fields in `MESSAGE_FIELDS`. A content is a string or, if
            it contains more than text, a list of parts: `{"type": "image"}`, `{"type": "text", "text": ...}`.
        extra: other fields of the entry: the `tools` the model may call, and `chat_template_kwargs`, for example
            `{"enable_thinking": False}`.
        place: location of the entry.
    """

    messages: list[Message]
    extra: dict[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def is_multimodal(self) -> bool:
        """True if the conversation contains images, videos or audio."""
        return any(not isinstance(message["content"], str) for message in self.messages)

    @property
    def template(self) -> dict[str, Any]:
        return template_arguments(self.extra)


def read_prompts(
    data: str | Path | Iterable[Any], left_out: Skipped | None = None
) -> Iterator[tuple[int, Conversation]]:
    """Yield prompts and conversations, each with its index among all entries. Entries that ask nothing are left out.

    Args:
        data: any input of `read_entries`, except that each line of a `.txt` file is a prompt.
        left_out: collects the entries that ask nothing. By default a warning lists them at the end, and a ValueError
            is raised if there are no others.
    """
    if isinstance(data, (str, Path)) and Path(data).suffix == ".txt":
        entries = _prompts_of_lines(Path(data))
    else:
        entries = read_entries(data, PROMPT_FORMATS)
    skipped, left = left_out or Skipped("prompts"), 0
    for number, (place, entry) in enumerate(entries):
        try:
            conversation = _question(entry)
        except ValueError as error:
            skipped.add(place, error)
            continue
        left += 1
        yield number, replace(conversation, place=place)
    if left_out is None:
        skipped.check_and_warn(left)


def _question(entry: Any) -> Conversation:
    conversation = parse_conversation(cleaned(entry), PROMPT_FORMATS)
    if conversation.is_multimodal:
        raise ValueError(
            "the conversation contains images, videos or audio, and would be answered without them: only training "
            "texts may contain them"
        )
    if not any(message["role"] == "user" and message["content"].strip() for message in conversation.messages):
        raise ValueError("the conversation asks nothing: it needs a user message that is not empty")
    return conversation


def questions(path: Path) -> Iterator[Conversation]:
    """Yield conversations up to where the target answers, from a file that `regenerate` reads."""
    for _, conversation in read_prompts(path):
        messages = conversation.messages
        last = max(i for i, message in enumerate(messages) if message["role"] in ("user", "tool"))
        yield replace(conversation, messages=messages[: last + 1])


def first_questions(path: Path, limit: int) -> tuple[list[Conversation], int]:
    """Return the first `limit` conversations and the number of all. Warns about every entry that asks nothing."""
    conversations = questions(path)
    first = list(islice(conversations, limit))
    return first, len(first) + sum(1 for _ in conversations)


def _prompts_of_lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    with opened(path) as file:
        for number, line in enumerate(filter(str.strip, file), start=1):
            yield f"{path}, prompt {number}", {"prompt": line.rstrip("\n")}
    if number == 0:
        raise ValueError(f"{path} is empty: one prompt per line is expected")


def parse_conversation(entry: Any, formats: str = FORMATS) -> Conversation:
    """Parse an entry that is a conversation or a single prompt. formats: expected formats, for error messages."""
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
    return Conversation([_message(message) for message in messages], extra_of(entry))


def extra_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the fields `tools` and `chat_template_kwargs` of an entry, see `Conversation.extra`."""
    extra = {name: entry[name] for name in (TOOLS, SWITCHES) if entry.get(name)}
    for name, kind, example in ((TOOLS, list, "a list"), (SWITCHES, dict, 'an object like {"enable_thinking": false}')):
        if not isinstance(extra.get(name, kind()), kind):
            raise ValueError(f"{name} must be {example}, got {extra[name]!r}")
    return extra


def template_arguments(extra: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for the chat template, given the further fields of an entry."""
    tools = {TOOLS: extra[TOOLS]} if TOOLS in extra else {}
    return extra.get(SWITCHES, {}) | tools


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"a message needs a role and a content, got {message!r}")
    role = ROLES.get(str(message.get("role") or message.get("from")))
    content = message.get("value") if message.get("content") is None else message["content"]
    fields = {name: message[name] for name in MESSAGE_FIELDS if message.get(name)}
    if message.get(FUNCTION_CALL) and "tool_calls" not in fields:
        fields["tool_calls"] = [{"type": "function", "function": message[FUNCTION_CALL]}]
    content = _joined("" if content is None and "tool_calls" in fields else content)
    if role is None or content is None:
        names = ", ".join(sorted(ROLES))
        raise ValueError(
            f"a message needs a role ({names}) and a content, which is a string or a list of parts with a type, got "
            f"{message}"
        )
    return {"role": role, "content": content} | fields


def _joined(content: Any) -> str | list[dict[str, Any]] | None:
    """Join parts that are all text into one string, which every chat template accepts; None if `content` is invalid."""
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
