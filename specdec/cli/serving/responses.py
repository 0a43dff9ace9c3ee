"""Responses, as the `openai` package's own types."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionTokenLogprob,
    chat_completion,
    chat_completion_chunk,
)
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from pydantic import BaseModel

from specdec.cli.serving.answer import Delta, Finish
from specdec.cli.serving.job import Job
from specdec.cli.serving.logprobs import TokenLogprob
from specdec.cli.serving.requests import ChatRequest


class Response:
    """Builds the response to a job, whole or as a stream of chunks.

    Args:
        job: the job.
    """

    def __init__(self, job: Job):
        self._job, request = job, job.request
        self._chat = isinstance(request, ChatRequest)
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._common: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }
        self._num_tokens = 0
        self._begun: set[int] = set()

    def whole(self, events: Iterable[Delta | Finish]) -> BaseModel:
        """Build the response from all events."""
        texts = [""] * self._job.num_choices
        entries: list[list[TokenLogprob]] = [[] for _ in texts]
        reasons: list[Any] = [None] * len(texts)
        for event in events:
            if isinstance(event, Delta):
                texts[event.index] += event.text
                entries[event.index] += event.logprobs
            else:
                reasons[event.index] = event.reason
                self._num_tokens += event.num_tokens
        rows = list(zip(range(len(texts)), texts, map(self._logprobs, entries), reasons, strict=True))
        if not self._chat:
            choices = [CompletionChoice(index=i, text=t, logprobs=p, finish_reason=r) for i, t, p, r in rows]
            return Completion(**self._common, object="text_completion", choices=choices, usage=self._usage())
        messages = [ChatCompletionMessage(role="assistant", content=text, refusal=None) for text in texts]
        return ChatCompletion(
            **self._common,
            object="chat.completion",
            choices=[
                chat_completion.Choice(index=i, message=messages[i], logprobs=p, finish_reason=r) for i, _, p, r in rows
            ],
            usage=self._usage(),
        )

    def chunks(self, event: Delta | Finish) -> Iterator[BaseModel]:
        """Build the chunks of a stream for an event. A choice of a chat begins with its role."""
        if self._chat and event.index not in self._begun:
            self._begun.add(event.index)
            yield self._chunk(event.index, {"role": "assistant", "content": "", "refusal": None})
        if isinstance(event, Delta):
            yield self._chunk(event.index, {"content": event.text}, self._logprobs(event.logprobs))
        else:
            self._num_tokens += event.num_tokens
            yield self._chunk(event.index, {}, reason=event.reason)

    def last_chunk(self) -> BaseModel:
        """Build the chunk of a stream that has the counts of tokens."""
        usage: dict[str, Any] = {"choices": [], "usage": self._usage()}
        if self._chat:
            return ChatCompletionChunk(**self._common, object="chat.completion.chunk", **usage)
        return Completion(**self._common, object="text_completion", **usage)

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: Any = None) -> BaseModel:
        usage: dict[str, Any] = {"usage": None} if self._job.request.includes_usage else {}
        if not self._chat:
            text = delta.get("content", "")
            choice = CompletionChoice.model_construct(index=index, text=text, logprobs=logprobs, finish_reason=reason)
            return Completion.model_construct(**self._common, object="text_completion", choices=[choice], **usage)
        part = chat_completion_chunk.Choice(
            index=index, delta=chat_completion_chunk.ChoiceDelta(**delta), logprobs=logprobs, finish_reason=reason
        )
        return ChatCompletionChunk(**self._common, object="chat.completion.chunk", choices=[part], **usage)

    def _usage(self) -> CompletionUsage:
        read, written = self._job.num_prompt_tokens, self._num_tokens
        return CompletionUsage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)

    def _logprobs(self, entries: list[TokenLogprob]) -> Any:
        """Log probabilities in the form of the request's kind; None if they were not asked for."""
        if self._job.request.alternatives is None:
            return None
        if not self._chat:
            return Logprobs(
                tokens=[entry.text for entry in entries],
                token_logprobs=[entry.logprob for entry in entries],
                top_logprobs=[{each.text: each.logprob for each in (*entry.top, entry)} for entry in entries],
                text_offset=[entry.start for entry in entries],
            )
        content = [
            ChatCompletionTokenLogprob(**_fields(entry), top_logprobs=[TopLogprob(**_fields(top)) for top in entry.top])
            for entry in entries
        ]
        return {"content": content, "refusal": None}


def _fields(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "bytes": entry.bytes, "logprob": entry.logprob}
