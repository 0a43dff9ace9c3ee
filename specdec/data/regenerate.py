"""`regenerate`: a head's training texts, written by the target itself; it resumes.

Owns the file of answers: a line per conversation, appended whole.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.data.answering import Answering, Request
from specdec.data.conversations import context_of, encode_prompt
from specdec.data.messages import SWITCHES, Asked, Message, extra_of, read_prompts

HALF_WRITTEN = b'{"id": '  # how our lines begin
AHEAD = 16  # times the rows, in which prompts of about one length are looked for
MOST_TURNS = 1000  # by which the seeds of conversations are apart


@dataclass
class Conversation:
    """One line of the output.

    Attributes:
        number: its entry's place in the prompts. asked: messages of the user's and the system's, in order.
        extra: what its chat template is told beside them, see `Asked`.
        messages: the conversation with the target's answers. finish: "length" if the last answer was cut off.
    """

    number: int
    asked: list[Message]
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    finish: str = "stop"

    def take_answer(self, request: Request, tokenizer: PreTrainedTokenizerBase) -> None:
        """The answer to what was asked last."""
        self.finish = "length" if request.cut else "stop"
        text = tokenizer.decode(request.answer if request.cut else request.answer[:-1])
        self.messages.append({"role": "assistant", "content": text})

    def next_question(self) -> list[Message] | None:
        """The conversation up to the next answer; None if it is over."""
        if self.finish == "length" or not self.asked:
            return None
        while self.asked:
            message = self.asked.pop(0)
            self.messages.append(message)
            if message["role"] == "user":
                return self.messages
        return None


def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Path | Any,
    out: Path,
    *,
    temperatures: Sequence[float] = (0.0,),
    batch_size: int = 8,
    max_new_tokens: int = 256,
    max_prompt_tokens: int = 1024,
    limit: int | None = None,
    switches: dict[str, Any] | None = None,
    seed: int = 0,
    progress: Callable[[int, int, int], Any] = lambda done, total, tokens: None,
    go_on: Callable[[], bool] = lambda: True,
) -> int:
    """Have the target answer prompts; answers that are there already are replaced.

    Args:
        prompts: see `read_entries`; entries are `{"prompt": ...}` or conversations.
        out: JSONL; conversations finished in an earlier run with the same target and prompts are kept.
        temperatures: conversations take turns with them. The rest is the target's own generation config.
        max_prompt_tokens: longer conversations are left out, and those that leave no room for an answer.
        switches: arguments of the chat template, say `{"enable_thinking": False}`; an entry's own
            `chat_template_kwargs` come before them.
        batch_size: conversations at a time; as soon as one is over, the next one takes its place, of about its length.
        seed: every conversation's draws are its own, whatever is answered beside it.
        progress: called with the conversations done, those there are, and the tokens written in this run.
        go_on: asked before each conversation; after a no, those that were begun are given up.

    Returns:
        The tokens written.
    """
    if not temperatures or min(temperatures) < 0:
        raise ValueError(f"temperatures must be at least 0, got {list(temperatures)}")
    room = context_of(target.config) - max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the {room + max_new_tokens} tokens that "
            "the target reads: choose fewer"
        )
    max_prompt_tokens = min(max_prompt_tokens, room)
    conversations = list(_conversations(prompts, limit, tokenizer, switches or {}))
    name = str(target.config._name_or_path)
    done = _finished(out, conversations, name, temperatures, max_new_tokens)
    handled, tokens = sum(c.number in done for c in conversations), 0
    too_long = 0
    progress(handled, len(conversations), tokens)
    waiting = _alike([c for c in conversations if c.number not in done], AHEAD * batch_size)
    further: deque[Request] = deque()  # of conversations that have begun

    def request(c: Conversation) -> Request | None:
        prompt = _next_prompt(c, tokenizer, max_prompt_tokens)
        temperature = temperatures[c.number % len(temperatures)]
        own_seed = (seed + c.number) * MOST_TURNS + len(c.messages)
        return None if prompt is None else Request(prompt, temperature, own_seed, c)

    def take() -> Request | None:
        nonlocal handled, too_long
        if further:
            return further.popleft()
        for c in waiting if go_on() else ():
            if (first := request(c)) is not None:
                return first
            handled, too_long = handled + 1, too_long + 1
        return None

    answering = Answering(target, batch_size, max_new_tokens)
    with out.open("a", encoding="utf-8") as file:
        for answered in answering.run(take):
            c = answered.asker
            c.take_answer(answered, tokenizer)
            tokens += len(answered.answer)
            if (after := request(c)) is not None:
                further.append(after)
                continue
            line = {"id": c.number, "target": name, "temperature": answered.temperature, "finish": c.finish}
            line["max_new_tokens"] = max_new_tokens
            file.write(json.dumps(line | {"messages": c.messages} | c.extra, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            handled += 1
            progress(handled, len(conversations), tokens)
            if not go_on():
                break
    progress(handled, len(conversations), tokens)
    if too_long:
        warnings.warn(
            f"{too_long} conversations were left out: their prompts are longer than {max_prompt_tokens} tokens"
        )
    return tokens


def _finished(
    out: Path, conversations: Sequence[Conversation], target: str, temperatures: Sequence[float], max_new_tokens: int
) -> set[int]:
    """Of an earlier run with the same options; a line that it left half-written is cut off."""
    done: set[int] = set()
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        return done
    whole = 0
    for line in out.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") and line.startswith(HALF_WRITTEN[: len(line)]):
            break
        try:
            entry = json.loads(line)
            number, theirs = entry["id"], [m for m in entry["messages"] if m["role"] != "assistant"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{out} is not a file of answers: choose another name") from error
        known = number < len(conversations)  # else behind today's --limit
        asked = conversations[number].asked if known else theirs
        if entry.get("target") != target or theirs != asked[: len(theirs)]:
            raise ValueError(f"{out} holds answers of another target or to other prompts: choose another name")
        if known and Asked([], conversations[number].extra).template != Asked([], extra_of(entry)).template:
            raise ValueError(f"{out} holds answers through a chat template told other things: choose another name")
        usual = {"temperature": temperatures[number % len(temperatures)], "max_new_tokens": max_new_tokens}
        for option, mine in usual.items():
            if entry.get(option, mine) != mine:
                raise ValueError(
                    f"{out} holds answers with {option} {entry[option]}, asked for is {mine}: choose another name, or "
                    "the options of the run that is to go on"
                )
        done.add(number)
        whole += len(line)
    os.truncate(out, whole)
    return done


def _conversations(
    prompts: Any, limit: int | None, tokenizer: PreTrainedTokenizerBase, switches: dict[str, Any]
) -> Iterator[Conversation]:
    for number, (place, given) in enumerate(islice(read_prompts(prompts), limit)):
        asked = [message for message in given.messages if message["role"] != "assistant"]
        if tokenizer.chat_template is None and len(asked) > 1:
            raise ValueError(f"{place}: the tokenizer has no chat template, so a conversation is one message")
        if any(message["role"] == "tool" for message in asked):
            raise ValueError(
                f"{place}: what a tool said answers a call of whoever wrote this conversation, which the target may "
                "not make: leave out all from the first call on (training takes such conversations as they are)"
            )
        own = {SWITCHES: switches | given.extra.get(SWITCHES, {})}
        yield Conversation(number, asked, given.extra | {name: told for name, told in own.items() if told})


def _alike(conversations: Sequence[Conversation], window: int) -> Iterator[Conversation]:
    """In windows of so many by length, up and down in turn: attention runs over the longest row that is answered."""
    up = True
    for start in range(0, len(conversations), window):
        by_length = sorted(conversations[start : start + window], key=lambda c: sum(map(_length, c.asked)))
        yield from by_length if up else reversed(by_length)
        up = not up


def _length(message: Message) -> int:
    return len(message["content"])


def _next_prompt(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> list[int] | None:
    """Tokens up to the next answer; None if the conversation is over, or too long to go on."""
    messages = conversation.next_question()
    if messages is None:
        return None
    try:
        prompt = encode_prompt(messages, tokenizer, **Asked(messages, conversation.extra).template)
    except ValueError as error:
        raise ValueError(f"entry {conversation.number}: {error}") from error
    if len(prompt) <= max_prompt_tokens:
        return prompt
    messages.pop()
    conversation.asked.clear()
    return None
