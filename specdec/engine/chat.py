"""`Chat`: a conversation that keeps the model's cache, so that each turn reads only the new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase

from specdec.engine.generator import SpeculativeGenerator
from specdec.engine.settings import ONE_ROW
from specdec.models.compat import CACHE
from specdec.models.introspection import device_of
from specdec.models.text_limits import space_after
from specdec.utils.prefix import common_prefix

SETTINGS = ONE_ROW | {"cache_implementation": None}  # whatever the model's generation config asks for


class Chat:
    """A conversation between a user and a model, in the model's chat template.

    Args:
        spec: generator of the model.
        tokenizer: tokenizer of the model, with a chat template.
        system: optional system prompt.
        options: further arguments of every `generate()` call, for example `max_new_tokens`.

    Attributes:
        messages: the messages so far, in the format of chat templates.

    Raises:
        ValueError: the tokenizer has no chat template, or an option does not fit one answer with a cache.

    Example:
        ```python
        chat = Chat(SpeculativeGenerator(model, "ngram"), tokenizer, max_new_tokens=256)
        print(chat.say("Hello!"))
        print(chat.spec.last_report)
        ```
    """

    def __init__(
        self,
        spec: SpeculativeGenerator,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
        **options: Any,
    ):
        if tokenizer.chat_template is None:
            raise ValueError("this model has no chat template: use a model that was tuned for conversations")
        for name, value in SETTINGS.items():
            if name in options and options[name] != value:
                raise ValueError(
                    f"Chat writes one answer, with a cache that it keeps: leave out {name}={options[name]!r}"
                )
        self.spec, self.tokenizer, self.options = spec, tokenizer, options
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._cached: list[int] = []  # tokens whose states are in the cache
        self._forget()

    def say(self, text: str, streamer: Any = None) -> str:
        """Send a user message and return the model's answer.

        After a `KeyboardInterrupt` the conversation keeps the answer so far. A turn that fails leaves it unchanged.

        Args:
            text: the user's message.
            streamer: receives the prompt and the answer's tokens, as in `generate()`; None for none.

        Returns:
            The answer, without special tokens. `spec.last_report` is the report of this turn.

        Raises:
            ValueError: the text contains an invalid character, or the conversation is longer than the model reads.
        """
        messages, answer = [*self.messages, {"role": "user", "content": text}], _Answer(streamer)
        ids = self._encoded(messages)
        space = space_after(self.spec.model, ids)
        prompt = torch.tensor([ids], device=device_of(self.spec.model))
        try:
            self._keep(common_prefix(self._cached, ids[:-1]))  # the last token must be read
            arguments = {"attention_mask": torch.ones_like(prompt), CACHE: self._cache, "tokenizer": self.tokenizer}
            arguments |= self.options | SETTINGS
            if space is not None:
                limit = arguments.get("max_new_tokens") or self.spec.model.generation_config.max_new_tokens
                if limit is None and "max_length" in arguments:
                    limit = arguments.pop("max_length") - len(ids)
                if limit is not None:
                    arguments["max_new_tokens"] = min(limit, space)
            out = self.spec.generate(prompt, streamer=answer, **arguments)
            self._cached = out[0, : self._length].tolist()
        except KeyboardInterrupt:
            self._keep(len(self._cached), interrupted=True)
            self.messages = [*messages, self._message(answer)]
            raise
        except BaseException:
            self._forget()
            raise
        self.messages = [*messages, self._message(answer)]
        return self.messages[-1]["content"]

    def _message(self, answer: _Answer) -> dict[str, str]:
        return {"role": "assistant", "content": self.tokenizer.decode(answer.tokens, skip_special_tokens=True)}

    def _encoded(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = messages[-1]["content"]
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text contains {text[error.start]!r} at position {error.start}, which is a byte that is not "
                "UTF-8 or half of a character: remove it"
            ) from None
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def _keep(self, length: int, interrupted: bool = False) -> None:
        """Crop the cache to `length` tokens, or clear it if it cannot be cropped (slid windows, recurrent states).

        Only some of the layers may have stored an `interrupted` pass.
        """
        try:
            for layer in self._cache.layers if length else ():
                if hasattr(layer, "has_previous_state"):
                    if interrupted or length < self._length:
                        raise ValueError("a recurrent state does not record which tokens it has read")
                elif layer.is_initialized and length < (have := layer.get_seq_length()):
                    layer.crop(length - have)  # negative: the number of tokens to remove
        except (AttributeError, ValueError, RuntimeError, NotImplementedError):
            length = 0
        if not length:
            self._forget()
        self._cached = self._cached[: self._length]

    @property
    def _length(self) -> int:
        """Number of tokens in the cache; 0 if it has recurrent states only."""
        try:
            return self._cache.get_seq_length()
        except ValueError:
            return 0

    def _forget(self) -> None:
        self._cache, self._cached = DynamicCache(config=self.spec.model.config), []


class _Answer:
    """A streamer that keeps the answer's tokens, and passes everything on to another streamer, if there is one."""

    def __init__(self, streamer: Any):
        self.tokens: list[int] = []
        self._streamer, self._has_prompt = streamer, False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.tokens += value.reshape(-1).tolist()
        self._has_prompt = True
        if self._streamer is not None:
            self._streamer.put(value)

    def on_accept(self, accepted: bool) -> None:
        if hasattr(self._streamer, "on_accept"):
            self._streamer.on_accept(accepted)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()
