"""`Chat`: a conversation with a model whose cache is kept, so that a turn reads only what is new.

Owns the messages and the cache. Knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase

from specdec.cli.streamer import ColourStreamer
from specdec.engine.generator import SpeculativeGenerator
from specdec.engine.report import Report
from specdec.models.compat import CACHE


class Chat:
    """Turns of a user and a model, in its chat template.

    Args:
        system: what the conversation begins with, if anything.
        options: further arguments of every `generate()` call.

    Attributes:
        messages: so far, as chat templates take them.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        spec: SpeculativeGenerator,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
        **options: Any,
    ):
        if tokenizer.chat_template is None:
            raise ValueError("this model has no chat template: take one that was tuned for conversations")
        self.spec, self.tokenizer, self.options = spec, tokenizer, options
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._cached: list[int] = []  # tokens whose keys and values are in the cache
        self._forget()

    def say(self, text: str, streamer: ColourStreamer) -> Report:
        """A turn: the user's text in, the model's answer to the streamer.

        Interrupted (`KeyboardInterrupt`), the conversation goes on from what was said until then. A turn that fails
        leaves it as it was.

        Returns:
            What the turn took; `prefill` holds the seconds it read for.

        Raises:
            ValueError: the text holds what is no character.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._encoded(messages)
        prompt = torch.tensor([ids], device=self.spec.model.device)
        try:
            self._keep(_common(self._cached, ids))
            arguments = {"attention_mask": torch.ones_like(prompt), CACHE: self._cache, **self.options}
            out = self.spec.generate(prompt, streamer=streamer, **arguments)
            self._cached = out[0, : self._length].tolist()
        except KeyboardInterrupt:
            self._keep(len(self._cached), interrupted=True)
            self.messages = [*messages, self._answer(streamer)]
            raise
        except BaseException:
            self._forget()
            raise
        self.messages = [*messages, self._answer(streamer)]
        return self.spec.last_report

    def _answer(self, streamer: ColourStreamer) -> dict[str, str]:
        return {"role": "assistant", "content": self.tokenizer.decode(streamer.tokens, skip_special_tokens=True)}

    def _encoded(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = messages[-1]["content"]
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds {text[error.start]!r} at position {error.start}, which is a byte that is not "
                "UTF-8 or half of a character: leave it out"
            ) from None
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def _keep(self, length: int, interrupted: bool = False) -> None:
        """Of the cache so many tokens; all are forgotten where it cannot be cut (windows that have slid, states).

        Args:
            interrupted: in the middle of a pass, which some layers may have seen and others not.
        """
        try:
            for layer in self._cache.layers if length else ():
                if hasattr(layer, "has_previous_state"):
                    if interrupted or length < self._length:
                        raise ValueError("a state does not say which tokens it has seen")
                elif layer.is_initialized and length < (have := layer.get_seq_length()):
                    layer.crop(length - have)  # a negative number: how many go
        except (AttributeError, ValueError, RuntimeError, NotImplementedError):
            length = 0
        if not length:
            self._forget()
        self._cached = self._cached[: self._length]

    @property
    def _length(self) -> int:
        """Tokens in the cache; 0 where it holds states alone."""
        try:
            return self._cache.get_seq_length()
        except ValueError:
            return 0

    def _forget(self) -> None:
        self._cache, self._cached = DynamicCache(config=self.spec.model.config), []


def _common(cached: Sequence[int], ids: Sequence[int]) -> int:
    """How many of the cached tokens the text begins with; its last token has to be read in any case."""
    same = 0
    while same < min(len(cached), len(ids) - 1) and cached[same] == ids[same]:
        same += 1
    return same
