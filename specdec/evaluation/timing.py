"""`Runs`: timed calls of one method. Methods take turns, so that drift of the machine affects all of them alike."""

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

WARM_UP = 16  # new tokens of a warm-up call


class Clock(BaseStreamer):
    """Streamer that records when tokens arrive; the first entry is the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, value: Tensor) -> None:
        self.moments.append(perf_counter())

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Call:
    """A timed call.

    Attributes:
        text: (T,) int64, new tokens.
        seconds: duration of the call.
        decoding: seconds of these after the first token.
        report: report of the call; empty for plain decoding.
    """

    text: Tensor
    seconds: float
    decoding: float
    report: Report


class Runs:
    """The timed calls of one method, in order.

    Args:
        method: the method to measure.
        device: device of the target.
        arguments: arguments of `generate()`.
    """

    def __init__(self, method: Method, device: torch.device, arguments: dict[str, Any]):
        self.method, self._device, self._arguments = method, device, arguments
        self.calls: list[Call] = []

    def warm_up(self, prompt: Tensor) -> None:
        """Make a call that is not counted. The pacer keeps its estimates."""
        self.answer(prompt, max_new_tokens=WARM_UP)
        self.calls.clear()

    def answer(self, prompt: Tensor, **changed: Any) -> None:
        """Make a timed call for a prompt (T,) int64; `changed` overrides arguments."""
        ids, clock = prompt[None].to(self._device), Clock()
        mask = torch.ones_like(ids)  # otherwise a pad token in the prompt would count as padding
        torch.manual_seed(0)  # the same text for every method
        start = perf_counter()
        output = self.method.generate(ids, attention_mask=mask, streamer=clock, **self._arguments | changed)
        text = output[0, len(prompt) :].cpu()  # a host sync on accelerators
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
        """Seconds per token after each call's first; per token of all if there are no others."""
        later = self.tokens - len(self.calls)
        return self.decoding / later if later else self.seconds / self.tokens

    @property
    def report(self) -> Report:
        """Sum of the calls' reports."""
        total = Report()
        for call in self.calls:
            total.add(call.report)
        return total

    def measured(self) -> Measured:
        first = (self.seconds - self.decoding) / len(self.calls)
        return Measured(self.method.name, self.method.code, self.tokens, self.seconds, first, self.report)


def take_turns(runs: Sequence[Runs], prompts: Sequence[Tensor], step: Callable[[], Any]) -> int:
    """Answer each prompt (T,) with each method in turn, and call `step` after each call.

    Returns:
        Number of prompts that all methods answered. If interrupted (Ctrl-C), further calls are dropped.
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
