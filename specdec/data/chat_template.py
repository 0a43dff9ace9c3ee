"""`ChatTemplate`: tokenizes conversations and finds where an answer begins and where the target would end it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from specdec.data.messages import Message
from specdec.utils.prefix import common_prefix

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # marks the target's text, if the template supports it
QUESTION, ANSWER = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}


@dataclass(frozen=True)
class Answer:
    """An answer as the template renders it right after it was given.

    Attributes:
        prompt: token ids before the answer.
        ids: token ids of the answer, up to and including the token that ends the turn.
        trimmed: True if the template removes whitespace from the answer.
    """

    prompt: list[int]
    ids: list[int]
    trimmed: bool


class ChatTemplate:
    """A tokenizer's chat template and the tokens that end a turn in it.

    Args:
        tokenizer: tokenizer of the target.
        ends: end-of-text tokens from the target's generation config.

    Attributes:
        end: token with which the target ends a turn; None if the template ends turns without a special token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()):
        self.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        known = [token for token in (eos, *ends) if token is not None]
        tail = self._after_answers()
        if tail is None:
            self.end = next((token for token in known if token in ends), eos)
        else:
            special = {i for i, token in tokenizer.added_tokens_decoder.items() if not token.content.isspace()}
            candidates = [token for token in tail if token in special.union(known)]
            self.end = next((token for token in candidates if token in known), next(iter(candidates), None))
        self._tail = tail or []
        self._stops = {*known, self.end}

    def answer(self, messages: Sequence[Message], cut: bool, **template: Any) -> Answer | None:
        """Tokenize the last message, which is an answer. Returns None if the template changes its text.

        Args:
            messages: a conversation that ends with the answer.
            cut: the answer was cut off and has no end token.
            template: arguments of the chat template.
        """
        before = rendered(messages[:-1], self.tokenizer, True, **template)
        after = rendered(messages, self.tokenizer, False, **template)
        parts = _parts(messages[-1])
        trimmed = not _contains(before, after, parts)
        if trimmed and not _contains(
            _without_spaces(before), _without_spaces(after), list(map(_without_spaces, parts))
        ):
            return None
        prompt, ids = self._ids(before), self._ids(after)
        start, marked = common_prefix(prompt, ids), self._marked(messages, **template)
        if start == len(prompt):
            start = max(start, marked or 0)
        elif marked is None:
            return None
        else:
            start = marked
        return Answer(ids[:start], self.turn(ids[start:], cut), trimmed)

    def turn(self, ids: list[int], cut: bool) -> list[int]:
        """Return the tokens that the target writes itself.

        Args:
            ids: tokens of the answer, followed by those that the template adds after it.
            cut: the target did not end the turn.
        """
        for place, token in enumerate(ids):
            if token in self._stops:
                return ids[: place if cut else place + 1]
        return ids[: len(ids) - common_prefix(ids[::-1], self._tail[::-1])]

    def response(self, text: str, cut: bool) -> list[int]:
        """Tokenize an answer given verbatim, including its end token."""
        end = [] if self.end is None else [self.end]
        return self.turn(self._ids(text) + end, cut)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _after_answers(self) -> list[int] | None:
        """Tokens that the template adds after an answer, without those that end any conversation (as Phi-3's does).

        None if the template does not render a one-word answer.
        """
        try:
            asked, asking = (rendered([QUESTION], self.tokenizer, generation) for generation in (False, True))
            _, found, tail = rendered([QUESTION, ANSWER], self.tokenizer, False).rpartition(ANSWER["content"])
        except ValueError:  # no template, or one that refuses this conversation
            return None
        if not found:  # a template that expects contents in parts
            return None
        ids, closing = self._ids(tail), self._ids(asked)
        closing = closing[common_prefix(closing, self._ids(asking)) :]
        return ids[: len(ids) - len(closing)] if closing and ids[-len(closing) :] == closing else ids

    def _marked(self, messages: Sequence[Message], **template: Any) -> int | None:
        """Start of the last answer according to the template's `{% generation %}` blocks; None if it has none."""
        source = self.tokenizer.get_chat_template(tools=template.get("tools"))
        if not self.tokenizer.is_fast or not GENERATION.search(source):
            return None
        mask = self.tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **template
        )["assistant_masks"]
        last = "".join(map(str, mask)).rstrip("0")
        return last.rfind("0") + 1 if last else None


def rendered(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, generation: bool, **template: Any) -> str:
    """Render a conversation with the chat template.

    Args:
        messages: the conversation.
        tokenizer: tokenizer with the template.
        generation: add the generation prompt, after which the target answers.
        template: arguments of the chat template.

    Raises:
        ValueError: there is no template, or it refuses the conversation.
    """
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template: use entries with a prompt and a response, or plain text")
    try:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=generation, tokenize=False, **template
        )
    except (TemplateError, TypeError) as error:  # TypeError: a template for strings, and a content in parts
        raise ValueError(f"the conversation does not fit the chat template: {error}") from error


def _parts(message: Message) -> list[str]:
    """Texts of an answer: its thinking, its content, and the names of the functions it calls."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    called = [call.get("function", call).get("name") for call in message.get("tool_calls", ())]
    return [part for part in (message.get("reasoning_content"), *texts, *called) if part]


def _contains(before: str, after: str, parts: Sequence[str]) -> bool:
    """Return whether `after` contains all parts of an answer, not only in the prompt `before`."""
    start = common_prefix(before, after)
    return all((place := after.rfind(part)) >= 0 and place + len(part) > start for part in parts)


def _without_spaces(text: str) -> str:
    return "".join(text.split())
