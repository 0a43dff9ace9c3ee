"""`PromptReader`: turns the messages and texts of requests into token ids, away from the event loop."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinja2.exceptions import TemplateError

from specdec.cli.serving.errors import ApiError, invalid
from specdec.cli.serving.requests import ChatRequest, CompletionRequest, Request

THREADS = 2


class PromptReader:
    """Reads prompts with a tokenizer of its own: one tokenizer may not be changed in one thread and used in another.

    Args:
        tokenizer: tokenizer of the model; copied.
        vocab_size: number of tokens that the model has embeddings for.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._tokenizer, self._vocab_size = copy.deepcopy(tokenizer), vocab_size
        self._tokenizer("a")  # the first use may change the tokenizer's settings for padding and truncation
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")

    async def read(self, request: Request) -> list[list[int]]:
        """Return the token ids of each prompt of a request.

        Raises:
            ApiError: the chat template refuses the messages, a prompt is empty, or the model does not have a token.
        """
        encode: Callable[[Any], list[list[int]]] = self._chat if isinstance(request, ChatRequest) else self._completion
        name = "messages" if isinstance(request, ChatRequest) else "prompt"
        prompts = await asyncio.get_running_loop().run_in_executor(self._threads, encode, request)
        for i, ids in enumerate(prompts):
            if not ids:
                raise invalid(f"{name} gives no tokens{f' at {i}' if len(prompts) > 1 else ''}: write something", name)
            if max(ids) >= self._vocab_size:
                raise invalid(f"{name} has token {max(ids)}, but the model has {self._vocab_size}", name)
        return prompts

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _chat(self, request: ChatRequest) -> list[list[int]]:
        if self._tokenizer.chat_template is None:
            problem = "this model has no chat template: use /v1/completions, or a model for conversations"
            raise ApiError(400, problem, "messages", "no_chat_template")
        messages = [message.for_template for message in request.messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise invalid(f"the model's chat template refuses these messages: {error}", "messages") from error
        return self._encoded([text], special=False)

    def _completion(self, request: CompletionRequest) -> list[list[int]]:
        return [
            ids
            for prompt in request.prompt
            for ids in ([prompt] if isinstance(prompt, list) else self._encoded([prompt]))
        ]

    def _encoded(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        return [list(self._tokenizer(text, add_special_tokens=special)["input_ids"]) for text in texts]
