"""`Runs`: how a target answers prompts in one way; several take turns, so that the machine's drift hits them alike.

Owns the clock around a call. What is said of the times stands elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from specdec.engine.report import Report
from specdec.evaluation.diagnosis import Measured
from specdec.evaluation.methods import Method

WARM_UP = 16  # tokens of the calls that are not counted


class Clock(BaseStreamer):
    """Notes when tokens came; what comes first is the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, value: Tensor) -> None:
        self.moments.append(perf_counter())

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Call:
    """text: new tokens, (T,) int64. seconds: of the whole call. decoding: of them, after the first token."""

    text: Tensor
    seconds: float
    decoding: float
    report: Report


class Runs:
    """The calls of one way, in the order in which they were made."""

    def __init__(self, method: Method, device: torch.device, arguments: dict[str, Any]):
        self.method, self._device, self._arguments = method, device, arguments
        self.calls: list[Call] = []

    def warm_up(self, prompt: Tensor) -> None:
        """A call that is not counted; what it taught pacing stays."""
        self.answer(prompt, max_new_tokens=WARM_UP)
        self.calls.clear()

    def answer(self, prompt: Tensor, **changed: Any) -> None:
        ids, clock = prompt[None].to(self._device), Clock()
        mask = torch.ones_like(ids)  # without one, a pad token in a prompt would be taken for padding
        torch.manual_seed(0)  # the same text in every way
        start = perf_counter()
        output = self.method.generate(ids, attention_mask=mask, streamer=clock, **self._arguments | changed)
        text = output[0, len(prompt) :].cpu()  # on an accelerator, this waits for it
        seconds = perf_counter() - start
        report = Report() if self.method.spec is None else self.method.spec.last_report
        self.calls.append(Call(text, seconds, clock.moments[-1] - clock.moments[1], report))

    @property
    def tokens(self) -> int:
        return sum(len(call.text) for call in self.calls)

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.calls)

    @property
    def decoding(self) -> float:
        return sum(call.decoding for call in self.calls)

    @property
    def step(self) -> float:
        """Seconds per token after the first; of all, if there are no others."""
        later = self.tokens - len(self.calls)
        return self.decoding / later if later else self.seconds / self.tokens

    @property
    def report(self) -> Report:
        """Of all calls."""
        total = Report()
        for call in self.calls:
            total.add(call.report)
        return total

    def measured(self) -> Measured:
        first = (self.seconds - self.decoding) / len(self.calls)
        return Measured(self.method.name, self.method.code, self.tokens, self.seconds, first, self.report)


def take_turns(runs: Sequence[Runs], prompts: Sequence[Tensor], step: Callable[[], Any]) -> int:
    """Every way answers every prompt (T,), one way after the other; `step` is called after each call.

    Returns:
        How many prompts all of them answered: fewer than there are if it was interrupted (Ctrl-C), and calls behind
        these are dropped.
    """
    try:
        for prompt in prompts:
            for run in runs:
                run.answer(prompt)
                step()
    except KeyboardInterrupt:
        answered = min(len(run.calls) for run in runs)
        for run in runs:
            del run.calls[answered:]
        return answered
    return len(prompts)
