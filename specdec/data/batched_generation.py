"""`BatchedGenerator`: continuous batching without drafts. A row whose answer has ended takes the next prompt.

With many rows, one token per row already uses the hardware well, so it matters more that no row waits for the longest.
The target's generation config is respected: each request has its own logits processors, and plain `generate()` runs
what a batch cannot (beams, stop strings, time limits). Requests with equal processors get their tokens together.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, RepetitionPenaltyLogitsProcessor

from specdec.engine.hf.call import Call
from specdec.engine.hf.eligibility import decided_before, why_plain
from specdec.engine.hf.hooks import plain, with_stop_strings
from specdec.models.capability import capability
from specdec.models.compat import is_synced
from specdec.models.introspection import device_of, end_tokens
from specdec.models.runner import ModelRunner
from specdec.sampling.logits_processors import CONTEXT_FREE
from specdec.utils.device_copies import moved, uploaded

UNORDERED = (*CONTEXT_FREE, RepetitionPenaltyLogitsProcessor)  # see `_is_unordered`
READ_AT_ONCE = 2048  # tokens of prompts, including padding, that are read in one pass
FREE = 16  # prompts are read once one of so many rows is free
ENDS = (MaxLengthCriteria, EosTokenCriteria)  # stopping criteria that a batch supports
# One answer as a plain tensor, whatever output the generation config asks for.
ANSWER = {"num_return_sequences": 1, "return_dict_in_generate": False, "output_attentions": False, "use_cache": True}


@dataclass
class Request:
    """One prompt and its answer.

    Args:
        prompt: token ids.
        temperature: 0 for greedy decoding.
        seed: random seed of this request, independent of the other rows.
        owner: any object of the caller, to identify the request.

    Attributes:
        answer: token ids, including the end token.
        cut: True if there is no end token: the answer reached the maximum length, a stop string or a time limit.
        processors: logits processors that `generate()` would apply.
        random: source of the numbers that choose sampled tokens.
        text: token ids of the prompt and the answer.
    """

    prompt: list[int]
    temperature: float = 0.0
    seed: int = 0
    owner: Any = None
    answer: list[int] = field(default_factory=list)
    cut: bool = False
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    random: Random = field(default_factory=Random)
    text: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.text = array("q", self.prompt)

    def append(self, token: int) -> None:
        """Append a token to the answer."""
        self.answer.append(token)
        self.text.append(token)


class BatchedGenerator:
    """Answers requests in one batch of the target, with continuous batching.

    Args:
        model: the target.
        rows: number of prompts answered at a time; 1 is used if the model does not support ragged batches.
        max_new_tokens: maximum length of an answer.
        tokenizer: needed if the model's generation config has stop strings.
        go_on: called before each token. If it returns False, `run` ends without the unfinished answers.

    Raises:
        ValueError: the generation config asks for a feature outside `generate()`'s decoding loops.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        max_new_tokens: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ):
        outside = decided_before(model, None, {})
        if outside:
            raise ValueError(f"the target's generation config is not supported: {outside}. Remove this setting from it")
        self._capability = capability(model)
        self.model, self.max_new_tokens, self._tokenizer, self._warned = model, max_new_tokens, tokenizer, False
        self._go_on = go_on
        self.rows = rows if self._capability.trees else 1
        sized = device_of(model).type == "cuda" and self._capability.trees
        self._batch = ModelRunner(model, self._capability.masks, sized=sized)
        self._reader = ModelRunner(model, self._capability.masks)
        self._ends = end_tokens(model)

    @torch.no_grad()
    def run(self, take: Callable[[], Request | None]) -> Iterator[Request]:
        """Yield each request when its answer ends.

        Args:
            take: called for each free row; returns the next request, or None if there is none at the moment.
        """
        if self._capability.masks is not None:
            self._batch.start(self.rows)
        running: list[Request | None] = [None] * self.rows
        while True:
            # Never later than at a half, where rows are given up below.
            if running.count(None) >= min((len(running) + 1) // 2, max(1, self.rows // FREE)):
                yield from self._fill(running, take)
            busy = [row for row, request in enumerate(running) if request is not None]
            if not busy or not self._go_on():
                return
            if 2 * len(busy) <= len(running):  # no request was left for the free rows
                self._batch.cache.keep(busy)
                running, busy = [running[row] for row in busy], list(range(len(busy)))
            self._step(running, busy)
            for row in busy:
                request = running[row]
                if request is not None and self._is_finished(request):
                    running[row] = None
                    self._batch.truncate([0 if r == row else n for r, n in enumerate(self._batch.lengths)])
                    yield request

    def _fill(self, running: list[Request | None], take: Callable[[], Request | None]) -> Iterator[Request]:
        """Read prompts into the free rows and generate their first tokens. Yields answers that need no more tokens."""
        while free := [row for row, request in enumerate(running) if request is None]:
            asked: list[Request] = []
            while len(asked) < len(free) and self._go_on() and (request := take()) is not None:
                self._prepare(request)
                if request.answer:
                    request.cut = request.answer[-1] not in self._ends
                    yield request
                else:
                    asked.append(request)
            if not asked:
                return
            for group in _of_about_one_length(asked):
                if not self._go_on():
                    return
                rows, free = free[: len(group)], free[len(group) :]
                self._read(rows, group)
                for row, request in zip(rows, group, strict=True):
                    if self._is_finished(request):
                        yield request
                    else:
                        running[row] = request

    def _read(self, rows: Sequence[int], requests: Sequence[Request]) -> None:
        """Read the requests' prompts into rows, and generate their first tokens."""
        width = max(len(request.prompt) for request in requests)
        pads = [width - len(request.prompt) for request in requests]
        padded = [[0] * pad + request.prompt for pad, request in zip(pads, requests, strict=True)]
        self._reader.start(len(requests))
        logits = self._reader.extend(uploaded(padded, device_of(self.model)), pads).logits
        for source, row in enumerate(rows):
            self._batch.cache.adopt(row, self._reader.cache, source)
        self._append(requests, logits[:, 0])

    def _prepare(self, request: Request) -> None:
        """Take the logits processors of a request from `model.generate()`.

        If it would use another decoding loop than ours, run that loop and take the whole answer.
        """

        def decode(
            model: PreTrainedModel,
            input_ids: Tensor,
            *,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **inputs: Any,
        ):
            parts = (input_ids, logits_processor, stopping_criteria, generation_config)
            call = Call(*parts, streamer=None, model_kwargs=inputs, encoder_outputs=None, text_kwargs=inputs)
            others = [type(criterion).__name__ for criterion in call.criteria if type(criterion) not in ENDS]
            reason = f"the generation config uses {', '.join(others)}" if others else None
            reason = reason or why_plain(model, self._capability, call, uses_target_choices=True)
            if reason is None:
                request.processors = logits_processor
                return input_ids
            if not self._warned:
                self._warned = True
                warnings.warn(f"answers are generated one at a time with plain generate(): {reason}")
            torch.manual_seed(request.seed)
            return plain(model, call, is_synced(model, None))

        request.random.seed(request.seed)
        prompt = torch.tensor([request.prompt], device=device_of(self.model))
        options = ANSWER | sampling(request.temperature) | {"max_new_tokens": self.max_new_tokens}
        options = with_stop_strings(self.model, None, options | {"tokenizer": self._tokenizer})
        options.pop("tokenizer")
        text = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), custom_generate=decode, **options)
        request.answer = text[0, prompt.shape[1] :].tolist()

    def _step(self, running: Sequence[Request | None], busy: Sequence[int]) -> None:
        """Generate one token for every busy row."""
        B, device = len(running), device_of(self.model)
        last = torch.tensor([[request.answer[-1] if request else 0] for request in running], device=device)
        depth = torch.zeros(B, 1, dtype=torch.long, device=device)
        logits = self._batch.grow(last, depth, depth[..., None] == 0, chain=True).logits  # (B, 1, V)
        self._batch.commit([int(request is not None) for request in running])
        self._append([request for request in running if request], logits[list(busy), 0])

    def _append(self, requests: Sequence[Request], logits: Tensor) -> None:
        """Choose each request's next token from its logits (R, V)."""
        alike: dict[Hashable, list[int]] = {}  # requests whose tokens are chosen together
        for i, request in enumerate(requests):
            together = all(map(_is_unordered, request.processors))
            alike.setdefault((request.temperature, None if together else i), []).append(i)
        for group in alike.values():
            whole = len(group) == len(requests)
            chosen = _chosen([requests[i] for i in group], logits if whole else logits[group])
            for i, token in zip(group, chosen, strict=True):
                requests[i].append(token)

    def _is_finished(self, request: Request) -> bool:
        ended = request.answer[-1] in self._ends
        request.cut = not ended and len(request.answer) >= self.max_new_tokens
        return ended or request.cut


def _of_about_one_length(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Divide requests into groups whose prompts are read in one pass."""
    group: list[Request] = []
    for request in sorted(requests, key=lambda request: len(request.prompt)):
        if group and (len(group) + 1) * len(request.prompt) > READ_AT_ONCE:
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def _is_unordered(processor: Any) -> bool:
    """Return whether a logits processor reads no text, or only which tokens it has."""
    return type(processor) in UNORDERED and getattr(processor, "prompt_ignore_length", None) is None


def _chosen(requests: Sequence[Request], logits: Tensor) -> list[int]:
    """Choose the next token of requests with equal processors from their logits (R, V)."""
    processors, samples = requests[0].processors, requests[0].temperature > 0
    scores = logits
    if processors:
        scores = processors(moved(_texts(requests), logits.device), logits.float())
    if not samples:
        return scores.argmax(-1).tolist()
    possible = scores.isfinite().any(0).nonzero()[:, 0]  # a distribution over all tokens takes milliseconds on a CPU
    exact = torch.float64 if logits.device.type in ("cpu", "cuda") else torch.float32  # others may lack float64
    mass = scores[:, possible].float().softmax(-1).to(exact).cumsum(-1)
    drawn = torch.tensor([[request.random.random()] for request in requests], dtype=exact)
    drawn = moved(drawn, logits.device)
    place = torch.searchsorted(mass, drawn * mass[:, -1:], right=True).clamp(max=len(possible) - 1)
    return possible[place[:, 0]].tolist()


def _texts(requests: Sequence[Request]) -> Tensor:
    """The texts of some requests, (R, T) int64. Shorter ones repeat their first token at the end."""
    rows = [np.frombuffer(request.text, dtype=np.int64) for request in requests]
    texts = np.empty((len(rows), max(map(len, rows))), dtype=np.int64)
    for text, row in zip(texts, rows, strict=True):
        text[: len(row)], text[len(row) :] = row, row[0]
    return torch.from_numpy(texts)


def sampling(temperature: float) -> dict[str, Any]:
    """Return the sampling arguments of `generate()`; temperature 0 is greedy."""
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
