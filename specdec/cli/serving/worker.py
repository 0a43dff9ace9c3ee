"""`Worker`: the one thread that runs the model."""

from __future__ import annotations

import logging
import traceback
from functools import partial
from threading import Thread
from time import perf_counter
from typing import Any

import torch

from specdec.cli.serving.answer import Answer
from specdec.cli.serving.errors import ApiError, shutting_down
from specdec.cli.serving.fair_queue import FairQueue, Full
from specdec.cli.serving.job import Done, Job
from specdec.cli.serving.logprobs import LogprobRecorder
from specdec.cli.serving.prefill import Cancelled, interruptible
from specdec.cli.serving.requests import CompletionRequest
from specdec.cli.serving.settings import processors, settings
from specdec.engine.generator import SpeculativeGenerator
from specdec.models.introspection import device_of, end_tokens

log = logging.getLogger(__name__)


class Worker:
    """Runs one choice of one job at a time; clients take turns after each choice.

    Everything that a choice depends on, its seed included, is set when it begins. So its text does not depend on other
    requests. An error of `generate()` fails its own request only.

    Args:
        spec: generator of the model, which nothing else may use meanwhile.
        tokenizer: tokenizer of the model.
        max_queue: most requests that wait.
    """

    def __init__(self, spec: SpeculativeGenerator, tokenizer: Any, max_queue: int):
        self.spec, self._tokenizer = spec, tokenizer
        self.queue: FairQueue[Job] = FairQueue(max_queue)
        self._device, self._ends = device_of(spec.model), end_tokens(spec.model)
        self._running: Job | None = None
        self._stopping = False
        self._seconds = 1.0  # that a choice takes, on average
        self._thread = Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended."""
        return self._thread.is_alive()

    @property
    def is_busy(self) -> bool:
        """True while a request is answered."""
        return self._running is not None

    def check_room(self) -> None:
        """Raise ApiError if a request would find no place in the queue."""
        if self._stopping or not self.is_alive:
            raise shutting_down()
        if self.queue.full:
            raise self._full()

    def submit(self, job: Job) -> None:
        """Append a job to the queue.

        Raises:
            ApiError: the queue is full, or the server is shutting down.
        """
        try:
            self.queue.put(job.client, job)
        except Full:
            raise shutting_down() if self._stopping else self._full() from None

    def cancel(self, job: Job) -> None:
        """Drop a job from the queue, or end it in its current round."""
        job.cancelled.set()
        self.queue.remove(job.client, job)

    def stop(self) -> None:
        """Fail all jobs, and end the thread once the model's current round is over."""
        self._stopping = True
        running = self._running
        for job in (*self.queue.close(), *([running] if running else ())):
            job.cancelled.set()
            job.send(shutting_down())

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end, at most so many seconds; return whether it has."""
        self._thread.join(seconds)
        return not self.is_alive

    def _full(self) -> ApiError:
        wait = {"Retry-After": str(min(60, max(1, round(self._seconds))))}
        problem = f"the queue is full: {self.queue.size} requests are waiting. Try again later"
        return ApiError(429, problem, code="queue_full", headers=wait)

    def _work(self) -> None:
        while (job := self.queue.get()) is not None:
            self._running = job
            if self._stopping:  # `stop` came before it could see this job
                job.cancelled.set()
                job.send(shutting_down())
            self._advance(job)
            self._running = job = None

    def _advance(self, job: Job) -> None:
        """Run the next choice of a job."""
        if job.cancelled.is_set():
            return
        start = perf_counter()
        try:
            self._run_choice(job)
        except Cancelled:
            return
        except Exception as error:
            log.error("a request failed:\n%s", traceback.format_exc())  # the commands' log shows messages alone
            job.send(ApiError(500, f"the model failed: {type(error).__name__}: {error}"))
            return
        self._seconds += (perf_counter() - start - self._seconds) / 8
        job.position += 1
        if job.position == job.num_choices:
            job.send(Done())
        elif not job.cancelled.is_set() and not self.queue.put_back(job.client, job):
            job.send(shutting_down())

    def _run_choice(self, job: Job) -> None:
        ids, request, model = job.prompts[job.prompt], job.request, self.spec.model
        recorder = None
        if request.alternatives is not None:
            recorder = LogprobRecorder(self._tokenizer, request.alternatives)
        arguments = settings(request, model.generation_config, job.limits[job.prompt])
        models_stops = model.generation_config.stop_strings or []
        if models_stops:
            arguments["tokenizer"] = self._tokenizer
        prompt = torch.tensor([ids], device=self._device)
        with interruptible(job.cancelled) as begun:
            answer = Answer(
                job.position,
                self._tokenizer,
                request.stop,
                self._ends,
                recorder,
                job.cancelled,
                [models_stops] if isinstance(models_stops, str) else models_stops,
                job.limits[job.prompt],
                ids if isinstance(request, CompletionRequest) else (),
                partial(Job.send, job),
                begun,
            )
            torch.manual_seed(job.choice_seed)
            self.spec.options(**request.options).generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                logits_processor=[*([recorder] if recorder else ()), *processors(request, len(ids))],
                stopping_criteria=[answer],
                **arguments,
            )
        if not job.cancelled.is_set():
            answer.finish()
