"""`Run`: one prompt generated in one way, with its times; and the running of it.

Plain and speculative decoding are timed alike, from outside: by the clock around the call and at each token the
streamer was given.
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
    """What came of one `generate()` call.

    Attributes:
        method: `PLAIN` or the proposer's name. prompt: its name.
        tokens: the new ones. seconds: the whole call, prefill included. times: of each token, from the call on.
        report: specdec's own counts; None for plain decoding.
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
    """Times of some runs of one method, pooled."""

    time_to_first_token: float  # mean, seconds
    time_per_token: float  # seconds per token, all of the call and all tokens
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
    """The counts of all runs in one report."""
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
    """Generate greedily from `inputs`, one row, showing the text.

    Args:
        generate: `model.generate` or `SpeculativeGenerator.generate`.
        report: asked for specdec's report after the call.
    """
    start = time.perf_counter()
    output = generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    seconds = time.perf_counter() - start
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    return Run(method, prompt, tokens, seconds, [moment - start for moment in streamer.times], report())


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")
