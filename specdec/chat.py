"""`Chat`: a conversation with a model whose cache is kept, so that a turn reads only what is new.

Owns the messages and the cache. Knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase

from specdec.compat import CACHE
from specdec.generator import SpeculativeGenerator
from specdec.report import Report
from specdec.streamer import ColourStreamer


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

        Interrupted (`KeyboardInterrupt`), the conversation goes on from what was said until then.

        Returns:
            What the turn took; `prefill` holds the seconds it read for.
        """
        self.messages.append({"role": "user", "content": text})
        ids = self._encoded()
        self._keep(_common(self._cached, ids))
        prompt = torch.tensor([ids], device=self.spec.model.device)
        arguments = {"attention_mask": torch.ones_like(prompt), CACHE: self._cache, **self.options}
        try:
            out = self.spec.generate(prompt, streamer=streamer, **arguments)
            self._cached = out[0, : self._cache.get_seq_length()].tolist()
        except KeyboardInterrupt:
            self._keep(len(self._cached))
            raise
        except BaseException:
            self.messages.pop()  # the turn never was
            self._forget()
            raise
        finally:
            if self.messages and self.messages[-1]["role"] == "user":
                answer = self.tokenizer.decode(streamer.tokens, skip_special_tokens=True)
                self.messages.append({"role": "assistant", "content": answer})
        return self.spec.last_report

    def _encoded(self) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def _keep(self, length: int) -> None:
        """Of the cache so many tokens; all are forgotten where it cannot be cut (windows that have slid)."""
        have = self._cache.get_seq_length()
        if length < have:
            try:
                self._cache.crop(length - have)  # a negative number: how many go
            except (ValueError, RuntimeError, NotImplementedError):
                self._forget()
        self._cached = self._cached[: self._cache.get_seq_length()]

    def _forget(self) -> None:
        self._cache, self._cached = DynamicCache(config=self.spec.model.config), []


def _common(cached: Sequence[int], ids: Sequence[int]) -> int:
    """How many of the cached tokens the text begins with; its last token has to be read in any case."""
    same = 0
    while same < min(len(cached), len(ids) - 1) and cached[same] == ids[same]:
        same += 1
    return same
