"""`Answering`: a target answers many prompts at once; a row whose answer has ended takes the next prompt at once.

Owns the rows and the draws. Knows nothing of conversations or files. Nothing is drafted: with many rows a pass is busy
with one token each, and what counts is that no row waits for the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specdec.capability import capability
from specdec.runner import ModelRunner, device_of
from specdec.transcript import end_tokens


@dataclass
class Request:
    """One prompt and its answer.

    Args:
        prompt: token ids. temperature: 0 for greedy. seed: of its own draws, whatever else is answered beside it.
        asker: whom the answer is for.

    Attributes:
        answer: token ids, the end token included. cut: it is as long as an answer may be, and has no end.
        processors: what `generate()` would put its logits through. draws: what its tokens are drawn with.
    """

    prompt: list[int]
    temperature: float = 0.0
    seed: int = 0
    asker: Any = None
    answer: list[int] = field(default_factory=list)
    cut: bool = False
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    draws: torch.Generator | None = None


class Answering:
    """One batch of the target's.

    Args:
        rows: prompts that are answered at a time; one where the model can't run ragged batches.
        max_new_tokens: of an answer.
    """

    def __init__(self, model: PreTrainedModel, rows: int, max_new_tokens: int):
        able = capability(model)
        self.model, self.max_new_tokens, self._masks = model, max_new_tokens, able.masks
        self.rows = rows if able.trees else 1
        self._batch, self._reader = ModelRunner(model, able.masks), ModelRunner(model, able.masks)
        self._ends = end_tokens(model)

    @torch.no_grad()
    def run(self, take: Callable[[], Request | None]) -> Iterator[Request]:
        """Requests, as their answers end. take: called for each row that is free; None if nothing is to be done now."""
        if self._masks is None:
            yield from self._alone(take)
            return
        self._batch.start(self.rows)
        running: list[Request | None] = [None] * self.rows
        while True:
            for row in range(len(running)):
                while running[row] is None and (request := take()) is not None:
                    self._read(row, request)
                    if self._over(request):
                        yield request
                    else:
                        running[row] = request
            busy = [row for row, request in enumerate(running) if request is not None]
            if not busy:
                return
            if 2 * len(busy) <= len(running):  # nothing was left to take
                self._batch.cache.keep(busy)
                running, busy = [running[row] for row in busy], list(range(len(busy)))
            self._step(running, busy)
            for row in busy:
                request = running[row]
                if request is not None and self._over(request):
                    running[row] = None
                    self._batch.truncate([0 if r == row else n for r, n in enumerate(self._batch.lengths)])
                    yield request

    def _alone(self, take: Callable[[], Request | None]) -> Iterator[Request]:
        """One by one, by `generate()`: the model's cache is another than ours."""
        while (request := take()) is not None:
            prompt = torch.tensor([request.prompt], device=device_of(self.model))
            torch.manual_seed(request.seed)
            options = _sampling(request.temperature) | {"max_new_tokens": self.max_new_tokens}
            text = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            request.answer = text[0, prompt.shape[1] :].tolist()
            request.cut = request.answer[-1] not in self._ends
            yield request

    def _read(self, row: int, request: Request) -> None:
        """The prompt into a row, and the answer's first token."""
        prompt = torch.tensor([request.prompt], device=device_of(self.model))
        request.draws = torch.Generator(prompt.device).manual_seed(request.seed)
        request.processors = _processors_of(self.model, prompt, request.temperature)
        self._reader.start(1)
        logits = self._reader.extend(prompt, [0]).logits
        self._batch.cache.adopt(row, self._reader.cache)
        self._append([request], logits[:, 0])

    def _step(self, running: Sequence[Request | None], busy: Sequence[int]) -> None:
        """A token for every busy row."""
        B, device = len(running), device_of(self.model)
        last = torch.tensor([[request.answer[-1] if request else 0] for request in running], device=device)
        depth = torch.zeros(B, 1, dtype=torch.long, device=device)
        logits = self._batch.grow(last, depth, depth[..., None] == 0, chain=True).logits  # (B, 1, V)
        self._batch.commit([int(request is not None) for request in running])
        self._append([request for request in running if request], logits[list(busy), 0])

    def _append(self, requests: Sequence[Request], logits: Tensor) -> None:
        """Choose each request's next token by its logits (R, V)."""
        best = logits.argmax(-1).tolist()
        for i, request in enumerate(requests):
            if request.processors or request.temperature:
                best[i] = self._processed(request, logits[i : i + 1].float())
            request.answer.append(best[i])

    def _processed(self, request: Request, logits: Tensor) -> int:
        """The next token by logits (1, V) that go through the model's processors first."""
        text = torch.tensor([request.prompt + request.answer], device=logits.device)
        scores = request.processors(text, logits)
        if not request.temperature:
            return int(scores.argmax(-1))
        possible = scores[0].isfinite().nonzero()[:, 0]  # a draw from all of a vocabulary takes milliseconds
        return int(possible[torch.multinomial(scores[0, possible].softmax(-1), 1, generator=request.draws)])

    def _over(self, request: Request) -> bool:
        ended = request.answer[-1] in self._ends
        request.cut = not ended and len(request.answer) >= self.max_new_tokens
        return ended or request.cut


def _processors_of(model: PreTrainedModel, prompt: Tensor, temperature: float) -> LogitsProcessorList:
    """What `model.generate()` would put the logits behind a prompt (1, T) through."""
    found: list[LogitsProcessorList] = []

    def take(model: PreTrainedModel, input_ids: Tensor, *, logits_processor: LogitsProcessorList, **others: Any):
        found.append(logits_processor)
        return input_ids

    mask = torch.ones_like(prompt)
    model.generate(prompt, attention_mask=mask, custom_generate=take, max_new_tokens=1, **_sampling(temperature))
    return found[0]


def _sampling(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
