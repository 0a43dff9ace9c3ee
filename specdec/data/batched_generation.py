"""`BatchedGenerator`: continuous batching without drafts. A row whose answer has ended takes the next prompt at once.

With many rows, one token per row already uses the hardware well, so it matters more that no row waits for the longest.
The target's generation config is respected: each request has its own logits processors, and plain `generate()` runs
what a batch cannot (beams, stop strings, time limits).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from specdec.engine.hf.call import Call
from specdec.engine.hf.eligibility import decided_before, why_plain
from specdec.engine.hf.hooks import plain, with_stop_strings
from specdec.models.capability import capability
from specdec.models.compat import is_synced
from specdec.models.introspection import device_of, end_tokens
from specdec.models.runner import ModelRunner

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
        generator: random generator for sampling.
    """

    prompt: list[int]
    temperature: float = 0.0
    seed: int = 0
    owner: Any = None
    answer: list[int] = field(default_factory=list)
    cut: bool = False
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    generator: torch.Generator | None = None


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
        self._batch, self._reader = (ModelRunner(model, self._capability.masks) for _ in range(2))
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
            for row in range(len(running)):
                while running[row] is None and (request := take()) is not None:
                    if self._begin(row, request):
                        running[row] = request
                    else:
                        yield request
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

    def _begin(self, row: int, request: Request) -> bool:
        """Read the prompt into a row and generate the first token. Returns whether the answer needs more tokens.

        An answer that needs plain `generate()` is generated completely here.
        """
        prompt = torch.tensor([request.prompt], device=device_of(self.model))
        self._prepare(request, prompt)
        if request.answer:
            request.cut = request.answer[-1] not in self._ends
            return False
        request.generator = torch.Generator(prompt.device).manual_seed(request.seed)
        self._reader.start(1)
        logits = self._reader.extend(prompt, [0]).logits
        self._batch.cache.adopt(row, self._reader.cache)
        self._append([request], logits[:, 0])
        return not self._is_finished(request)

    def _prepare(self, request: Request, prompt: Tensor) -> None:
        """Take the logits processors for a prompt (1, T) from `model.generate()`.

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
        best = logits.argmax(-1).tolist()
        for i, request in enumerate(requests):
            if request.processors or request.temperature:
                best[i] = self._processed(request, logits[i : i + 1].float())
            request.answer.append(best[i])

    def _processed(self, request: Request, logits: Tensor) -> int:
        """Choose the next token from logits (1, V) after the request's logits processors."""
        text = torch.tensor([request.prompt + request.answer], device=logits.device)
        scores = request.processors(text, logits)
        if not request.temperature:
            return int(scores.argmax(-1))
        possible = scores[0].isfinite().nonzero()[:, 0]  # sampling from the whole vocabulary takes milliseconds
        return int(possible[torch.multinomial(scores[0, possible].softmax(-1), 1, generator=request.generator)])

    def _is_finished(self, request: Request) -> bool:
        ended = request.answer[-1] in self._ends
        request.cut = not ended and len(request.answer) >= self.max_new_tokens
        return ended or request.cut


def sampling(temperature: float) -> dict[str, Any]:
    """Return the sampling arguments of `generate()`; temperature 0 is greedy."""
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
