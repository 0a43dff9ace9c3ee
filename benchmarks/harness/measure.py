"""`measure`: generates one job with one method, and measures its times.

All methods are timed in the same way: around the call, at each block that the streamer receives, and with a count of
the target's forward passes.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.harness.methods import Method
from benchmarks.harness.options import Bench
from benchmarks.harness.prompts import Job, left_padded
from specdec import Report


@dataclass(frozen=True)
class Measurement:
    """Result of a job.

    Attributes:
        tokens: new tokens of each row, up to and including its end token.
        seconds: duration of the whole call, including prefill.
        time_to_first_token: seconds to the first token, the mean if there are several calls.
        decode_seconds: seconds after the first token (or block).
        decode_tokens: number of tokens after the first one (or block).
        passes: forward passes of the target, including prefill.
    """

    tokens: list[list[int]]
    seconds: float
    time_to_first_token: float
    decode_seconds: float
    decode_tokens: int
    passes: int
    report: Report | None = None

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.tokens))


class Clock(BaseStreamer):
    """Streamer that records the time and number of the first tokens: assisted generation starts with a whole block."""

    def __init__(self, rows: int):
        self.rows, self.blocks = rows, 0
        self.first_moment, self.first_tokens = float("nan"), 0

    def put(self, value: Tensor) -> None:
        self.blocks += 1
        if self.blocks == 2:  # the first is the prompt
            self.first_moment, self.first_tokens = perf_counter(), value.numel() // self.rows

    def end(self) -> None:
        pass


def measure(
    method: Method,
    target: PreTrainedModel,
    job: Job,
    arguments: dict[str, Any],
    *,
    pad: int,
    ends: set[int],
    seed: int,
) -> Measurement:
    """Generate from `job` with `method`.

    Args:
        arguments: arguments of `generate()`.
        pad: padding token.
        ends: end tokens.
        seed: seed of torch, set before the call.
    """
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' advice on generation flags, once per call
        if not method.singles:
            return _call(method, target, job.prompts, arguments, pad, ends)
        parts = [_call(method, target, [prompt], arguments, pad, ends) for prompt in job.prompts]
    return Measurement(
        tokens=[part.tokens[0] for part in parts],
        seconds=sum(part.seconds for part in parts),
        time_to_first_token=sum(part.time_to_first_token for part in parts) / len(parts),
        decode_seconds=sum(part.decode_seconds for part in parts),
        decode_tokens=sum(part.decode_tokens for part in parts),
        passes=sum(part.passes for part in parts),
    )


def take(bench: Bench, method: Method, job: Job, repeat: int = 0, **changed: Any) -> Measurement:
    """Run `measure` with the benchmark's options.

    Args:
        changed: arguments of `generate()` that override the options.
    """
    return measure(
        method,
        bench.target,
        job,
        bench.options.generate_arguments | changed,
        pad=bench.pad_token,
        ends=bench.text_ends,
        # The same for all methods; another in each repeat, so that at T > 0 more than one text is sampled.
        seed=bench.options.seed + 1000 * zlib.crc32(job.id.encode()) + repeat,
    )


def _call(
    method: Method,
    target: PreTrainedModel,
    prompts: Sequence[Tensor],
    arguments: dict[str, Any],
    pad: int,
    ends: set[int],
) -> Measurement:
    inputs = left_padded(prompts, pad, target.device)
    clock, passes = Clock(len(prompts)), 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = target.register_forward_pre_hook(count)
    try:
        start = perf_counter()
        output = method.generate(**inputs, **arguments, pad_token_id=pad, streamer=clock)
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()  # on an accelerator, this waits for it
        end = perf_counter()
    finally:
        hook.remove()
    tokens = [_until_end(row, ends) for row in rows]
    return Measurement(
        tokens=tokens,
        seconds=end - start,
        time_to_first_token=clock.first_moment - start,
        decode_seconds=end - clock.first_moment,
        decode_tokens=sum(max(0, len(row) - clock.first_tokens) for row in tokens),
        passes=passes,
        report=method.report(),
    )


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens
