"""Measurements of whole calls: seconds per token and per round, memory, and the share of right tokens."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu.setting import Row, Setting
from benchmarks.harness import counting
from specdec import SpeculativeGenerator
from specdec.engine.report import Report

CALLS = 3  # measured calls. Before them specdec has two: the first captures with care, the second knows what to capture


def write(method: Any, ids: Tensor, new: int, **given: Any) -> Tensor:
    """Generate `new` tokens after ids (B, T). method: a `generate` function, or an object that has one."""
    generate = getattr(method, "generate", method)
    given = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": None} | given
    return generate(ids, attention_mask=torch.ones_like(ids), **given)


def timed(setting: Setting, work: Callable[[], Any]) -> float:
    """Return the seconds of `work`, including the device's."""
    setting.synchronize()
    start = perf_counter()
    work()
    setting.synchronize()
    return perf_counter() - start


def typical(setting: Setting, work: Callable[[], Any], repeats: int = CALLS) -> float:
    """Return the median seconds of several runs."""
    return median(timed(setting, work) for _ in range(repeats))


@contextmanager
def on_each_round(seen: Callable[[float], None]) -> Iterator[None]:
    """Within this context, call `seen` with the seconds of each round when it ends."""
    record = Report.record_round
    signature = inspect.signature(record)

    def recorded(*args: Any, **kwargs: Any) -> None:
        record(*args, **kwargs)
        seen(signature.bind(*args, **kwargs).arguments["seconds"])

    with patch.object(Report, "record_round", recorded):
        yield


@contextmanager
def replays_counted(setting: Setting) -> Iterator[list[None]]:
    """Yield a list that gets an entry for every CUDA graph that is replayed within this context."""
    counted: list[None] = []
    if not setting.cuda:
        yield counted
        return
    replay = torch.cuda.CUDAGraph.replay

    def replayed(graph: Any) -> None:
        counted.append(None)
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", replayed):
        yield counted


@contextmanager
def warned() -> Iterator[list[str]]:
    """Yield a list that holds specdec's warnings after this context."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += dict.fromkeys(str(given.message) for given in caught if "specdec" in str(given.message))


def measured(setting: Setting, name: str, method: Any, target: PreTrainedModel, ids: Tensor, calls: int = CALLS) -> Row:
    """Measure a method on prompts (B, T): the seconds per token after the first, as medians over calls.

    Args:
        setting: device and sizes.
        name: name of the method in the tables.
        method: a `generate` function, or a `SpeculativeGenerator`, whose rounds are measured, too.
        target: the model that writes.
        ids: (B, T) int64, prompts without padding.
        calls: measured calls.
    """
    (B, T), new = ids.shape, setting.new_tokens
    ours = isinstance(method, SpeculativeGenerator)
    outputs: list[Tensor] = []
    seconds: list[float] = []

    def call() -> None:
        outputs.append(write(method, ids, new))

    row: Row = {"method": name, "batch": B, "prompt": T, "new": new}
    with warned() as texts:
        for _ in range(2 if ours else 1):
            timed(setting, call)
        if setting.cuda:
            torch.cuda.reset_peak_memory_stats()
        if ours:
            rounds: list[float] = []
            with on_each_round(rounds.append), replays_counted(setting) as replays:
                seconds.append(timed(setting, call))
        seconds += [timed(setting, call) for _ in range(calls - len(seconds))]
        if setting.cuda:
            row["memory GB"] = torch.cuda.max_memory_allocated() / 1e9
        first = typical(setting, lambda: write(method, ids, 1), min(calls, 2))
    whole = median(seconds)
    row |= {"ms a token": 1e3 * (whole - first) / (new - 1), "tokens/s": B * (new - 1) / (whole - first)}
    if ours:
        row |= {
            "tokens a pass": new / (len(rounds) + 1),
            "median round ms": 1e3 * median(rounds),
            "first round ms": 1e3 * rounds[0],
            "slow rounds": sum(taken > 1.5 * median(rounds) for taken in rounds),
            "replays a round": len(replays) / len(rounds),
            "rounds ms": [round(1e3 * taken, 2) for taken in rounds],
        }
    row |= {"first token ms": 1e3 * first, "right": min(share(output, ids, target) for output in outputs)}
    row |= pass_bytes(target, B, T + new // 2)
    return row | ({"warned": texts} if texts else {})


def share(output: Tensor, ids: Tensor, target: PreTrainedModel) -> float:
    """Return the share of right tokens in `output` (B, T + new)."""
    return counting.share_counted(output, ids, target.config.vocab_size)


def pass_bytes(target: PreTrainedModel, rows: int, length: int) -> Row:
    """Gigabytes that a pass over few tokens reads at least: all weights but the embeddings, and all keys and values.

    Empty for mixtures of experts, of which a pass reads an unknown part.
    """
    config, embedding = target.config, target.get_input_embeddings().weight
    if hasattr(config, "num_experts"):
        return {}
    weights = sum(weight.nbytes for weight in target.parameters())
    if embedding is not target.get_output_embeddings().weight:
        weights -= embedding.nbytes  # a pass gathers a few of its rows
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * embedding.element_size()
    return {"pass GB": (weights + rows * length * per_token) / 1e9}
