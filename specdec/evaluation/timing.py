"""`time_call`: a timed call of `generate()`; `Runs`: the calls of one method, which takes turns with others.

Methods take turns, so that drift of the machine affects all of them alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from specdec.engine.draft_tally import IdleDraftWarning
from specdec.engine.report import Report
from specdec.evaluation.measured import Measured
from specdec.evaluation.methods import Method

WARM_UP = 16  # new tokens of a warm-up call
GPU_WARM_UPS = 2  # whole calls before others are timed: a function is captured after it ran a few times


class Clock(BaseStreamer):
    """Streamer that records when tokens arrive. Subclasses may show them.

    Attributes:
        times: `time.perf_counter()` at each token after the prompt.
        prompt_length: number of tokens of the prompt, or, of an encoder-decoder model, those before the text. None
            until they came.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.prompt_length: int | None = None

    def put(self, value: Tensor) -> None:
        """Receive the prompt, then the generated tokens.

        Args:
            value: token ids of any shape, int64.
        """
        if self.prompt_length is None:
            self.prompt_length = value.shape[-1]
            return
        self.times += [perf_counter()] * value.numel()
        self.show(value)

    def show(self, tokens: Tensor) -> None:
        """Show generated tokens."""

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Call:
    """A timed call.

    Attributes:
        texts: new tokens of each row.
        seconds: duration of the call, including prefill.
        times: seconds from the start of the call to each streamed token; empty if `generate` does not stream.
        report: specdec's report of the call; None for other methods.
    """

    texts: list[list[int]]
    seconds: float
    times: list[float]
    report: Report | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def time_to_first_token(self) -> float:
        return self.times[0] if self.times else float("nan")

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last one."""
        return self.times[-1] - self.times[0] if self.times else float("nan")


def time_call(method: Method, inputs: Mapping[str, Tensor], streamer: Clock | None = None, **arguments: Any) -> Call:
    """Generate with a method and measure when the call and each of its tokens were done.

    Args:
        method: the method to measure.
        inputs: tensors for `generate()`, among them `input_ids` (B, T) int64.
        streamer: receives the tokens, to show them for example.
        arguments: further arguments of `generate()`.
    """
    clock = streamer or Clock()
    start = perf_counter()
    output = method.generate(**inputs, **arguments, streamer=clock)
    start_of_text = inputs["input_ids"].shape[1] if clock.prompt_length is None else clock.prompt_length
    texts = output[:, start_of_text:].tolist()  # a host sync on accelerators
    seconds = perf_counter() - start
    report = None if method.spec is None else method.spec.last_report
    return Call(texts, seconds, [moment - start for moment in clock.times], report)


@dataclass(frozen=True)
class Speed:
    """Pooled times of several calls in seconds.

    Attributes:
        time_to_first_token: mean over the calls.
        time_per_token: duration of the calls, per token.
        time_per_output_token: time per token after each call's first; `time_per_token` if there are no others.
    """

    time_to_first_token: float
    time_per_token: float
    time_per_output_token: float

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Speed:
        streamed = [call for call in calls if call.times]
        tokens, later = sum(call.num_tokens for call in calls), sum(len(call.times) - 1 for call in streamed)
        per_token = sum(call.seconds for call in calls) / tokens if tokens else float("nan")
        decoding = sum(call.decode_seconds for call in streamed)
        first = sum(call.time_to_first_token for call in calls) / len(calls)
        return cls(first, per_token, decoding / later if later else per_token)


def pooled(reports: Iterable[Report | None]) -> Report:
    """Add up reports."""
    total = Report()
    for report in reports:
        if report is not None:
            total.add(report)
    return total


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

    @property
    def captures(self) -> bool:
        """True if functions are captured as CUDA graphs in the first calls."""
        return self._device.type == "cuda"

    def answer(self, prompt: Tensor, **changed: Any) -> None:
        """Make a timed call for a prompt (T,) int64; `changed` overrides arguments."""
        ids = prompt[None].to(self._device)
        # Without a mask, a pad token in the prompt would count as padding.
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", IdleDraftWarning)  # the results say it
            torch.manual_seed(0)  # the same text for every method
            self.calls.append(time_call(self.method, inputs, **self._arguments | changed))

    @property
    def report(self) -> Report:
        """Sum of the calls' reports; empty for plain decoding."""
        return pooled(call.report for call in self.calls)

    def measured(self, prompts: int) -> Measured:
        """Pool the calls, which answered so many prompts in each turn."""
        tokens, seconds = sum(call.num_tokens for call in self.calls), sum(call.seconds for call in self.calls)
        first = Speed.of(self.calls).time_to_first_token
        paces = tuple(
            tuple(Speed.of([call]).time_per_token for call in self.calls[at::prompts]) for at in range(prompts)
        )
        return Measured(self.method.name, self.method.code, tokens, seconds, first, self.report, paces)


def steps(progress: Callable[[int, int], Any], total: int) -> Callable[[], Any]:
    """Report that no call of `total` is done; the returned function reports one more each time."""
    done = count()

    def step() -> None:
        progress(next(done), total)

    step()
    return step


def warm_up(runs: Sequence[Runs], prompt: Tensor, step: Callable[[], Any]) -> None:
    """Make calls of each method that are not counted. Pacers keep their estimates."""
    for run in runs:
        if run.captures:
            for _ in range(GPU_WARM_UPS):
                run.answer(prompt)
        else:
            run.answer(prompt, max_new_tokens=WARM_UP)
        run.calls.clear()
        step()


@dataclass(frozen=True)
class Turns:
    """Turns that all methods have finished.

    Attributes:
        prompts: number of prompts that all methods answered in each turn.
        repeats: number of turns.
        stopped: True if interrupted before the last one.
    """

    prompts: int
    repeats: int
    stopped: bool


def take_turns(runs: Sequence[Runs], prompts: Sequence[Tensor], step: Callable[[], Any], repeats: int = 1) -> Turns:
    """Answer all prompts (T,) in each of `repeats` turns, each prompt with one method after another.

    Turns on the same prompt lie apart, so that their spread shows what the machine does meanwhile. Every other time the
    methods go in reverse, so that a steady drift of the machine favours none. `step` is called after each call.

    Returns:
        The turns that were finished. If interrupted (Ctrl-C), further calls are dropped.
    """
    try:
        for turn in range(repeats):
            for run in runs:
                run.method.start(turn)
            for place, prompt in enumerate(prompts):
                for run in runs if (turn + place) % 2 == 0 else reversed(runs):
                    run.answer(prompt)
                    step()
    except KeyboardInterrupt:
        done = min(len(run.calls) for run in runs)
        answered = min(done, len(prompts))
        turns = done // len(prompts) or 1
        for run in runs:
            del run.calls[answered * turns :]
        return Turns(answered, turns, stopped=True)
    return Turns(len(prompts), repeats, stopped=False)
