"""Resumption of `regenerate`: which prompts an earlier run has answered, and whether its file is one to continue.

Imports no torch: the command checks its files before it loads a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from specdec.data.answer_store import Answers
from specdec.data.messages import SWITCHES, Message, extra_of, read_prompts, template_arguments
from specdec.data.skipped import Skipped
from specdec.utils.paths import named

LEFT, DONE, USELESS = range(3)  # states of a prompt


@dataclass(frozen=True)
class Asked:
    """Questions of one entry, without their answers.

    Attributes:
        number: index of its entry among the prompts.
        place: location of the entry.
        messages: all messages except the answers.
        extra: further arguments of the chat template, see `Conversation`.
    """

    number: int
    place: str
    messages: list[Message]
    extra: dict[str, Any]


def asked(prompts: str | Path | Iterable[Any], switches: dict[str, Any], left_out: Skipped) -> Iterator[Asked]:
    """Yield what is asked in each entry. switches: arguments of the chat template; an entry's own take precedence."""
    for number, given in read_prompts(prompts, left_out):
        own = switches | given.extra.get(SWITCHES, {})
        extra = given.extra | ({SWITCHES: own} if own else {})
        calls = (i for i, one in enumerate(given.messages) if one["role"] == "tool" or one.get("tool_calls"))
        before = given.messages[: next(calls, None)]  # the target may not make the same calls
        messages = [message for message in before if message["role"] != "assistant"]
        yield Asked(number, given.place, messages, extra)


def states_of_prompts(
    answers: Answers, prompts: Iterable[Asked], target: str, temperatures: Sequence[float], max_new_tokens: int
) -> bytearray:
    """Return the state of each entry up to the last prompt: `LEFT` to do, `DONE` by an earlier run, or `USELESS`.

    Raises:
        ValueError: the file of answers is not one of this run.
    """

    def refuse(what: str, advice: str = "") -> NoReturn:
        raise ValueError(f"{answers.out} holds answers {what}: choose another output file{advice}")

    answered: dict[int, tuple[int, int, int]] = {}  # number of messages, and checksums to save memory
    for entry in answers.entries():
        number = entry["id"]
        if named(str(entry.get("target"))) != named(target):
            refuse(f"of {entry.get('target')}")
        usual = {"temperature": temperatures[number % len(temperatures)], "max_new_tokens": max_new_tokens}
        for option, mine in usual.items():
            if entry.get(option, mine) != mine:
                advice = ", or resume with the options of the earlier run"
                refuse(f"with {option} {entry[option]}, but this run uses {mine}", advice)
        given = [message for message in entry["messages"] if message["role"] != "assistant"]
        answered[number] = len(given), _checksum(given), _checksum(template_arguments(extra_of(entry)))
    done = bytearray()
    for prompt in prompts:
        done.extend(USELESS for _ in range(len(done), prompt.number))
        done.append(DONE if prompt.number in answered else LEFT)
        if done[-1] == LEFT:
            continue
        count, given_before, template = answered.pop(prompt.number)
        if _checksum(prompt.messages[:count]) != given_before:
            refuse("to other prompts")
        if _checksum(template_arguments(prompt.extra)) != template:
            refuse("with other chat template arguments")
    return done


def _checksum(content: Any) -> int:
    return hash(json.dumps(content, sort_keys=True))
