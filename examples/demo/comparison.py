"""`run`: generates a text with one method and measures its times.

Plain and speculative decoding are timed in the same way: around the call, and at each token that the streamer receives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.cli.streamer import ColourStreamer
from specdec.engine.report import Report

PLAIN = "plain"


@dataclass(frozen=True)
class Run:
    """Result of one `generate()` call.

    Attributes:
        method: `PLAIN` or the proposer's name.
        prompt: name of the prompt.
        tokens: new tokens.
        seconds: duration of the whole call, including prefill.
        times: time of each token in seconds after the start of the call.
        report: specdec's report; None for plain decoding.
    """

    method: str
    prompt: str
    tokens: list[int]
    seconds: float
    times: list[float]
    report: Report | None = None

    @property
    def time_to_first_token(self) -> float:
        return self.times[0] if self.times else float("nan")


@dataclass(frozen=True)
class Speed:
    """Pooled times of several runs of one method."""

    time_to_first_token: float  # mean, seconds
    time_per_token: float  # seconds of the whole call per token
    time_per_output_token: float  # seconds per token after the first

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Speed:
        later = sum(len(run.times) - 1 for run in runs if run.times)
        decoding = sum(run.times[-1] - run.times[0] for run in runs if run.times)
        return cls(
            _ratio(sum(run.time_to_first_token for run in runs), len(runs)),
            _ratio(sum(run.seconds for run in runs), sum(len(run.tokens) for run in runs)),
            _ratio(decoding, later),
        )


def pooled_report(runs: Sequence[Run]) -> Report:
    """Add up the reports of all runs."""
    total = Report()
    for run in runs:
        if run.report is not None:
            total.add(run.report)
    return total


def run(
    method: str,
    prompt: str,
    generate: Callable[..., Any],
    inputs: dict[str, Tensor],
    streamer: ColourStreamer,
    max_new_tokens: int,
    report: Callable[[], Report | None] = lambda: None,
) -> Run:
    """Generate greedily from `inputs` (one row), and print the text.

    Args:
        method: name of the method.
        prompt: name of the prompt.
        generate: `model.generate` or `SpeculativeGenerator.generate`.
        inputs: `input_ids` and `attention_mask`, (1, T) int64.
        streamer: prints the text and records times.
        max_new_tokens: maximum length of the text.
        report: called after generation to get specdec's report.
    """
    start = time.perf_counter()
    output = generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    seconds = time.perf_counter() - start
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    return Run(method, prompt, tokens, seconds, [moment - start for moment in streamer.times], report())


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")
