"""In which number format heads are trained, and targets read texts, on the machine at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter

import torch
from transformers import PreTrainedModel
from transformers.utils import is_torch_bf16_gpu_available

ROWS, WIDTH, TRIES = 512, 1024, 3  # of the product that is tried
MOST_TRIES, CLEAR = 20, 2.0  # another program disturbs some: they go on until one format is so many times faster


def pays(device: torch.device) -> bool:
    """Is a batch multiplied faster in bfloat16? A CPU without a unit for it takes many times as long."""
    if device.type != "cpu":
        return is_torch_bf16_gpu_available()
    return _seconds(torch.bfloat16) < _seconds(torch.float32)


@contextmanager
def without_denormals() -> Iterator[None]:
    """Numbers below 1e-38 are 0: gradients of tokens that no draft looks at are full of them, and CPUs multiply them
    many times slower.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def as_fast_as_it_reads(target: PreTrainedModel, device: torch.device | None = None) -> PreTrainedModel:
    """In float32 in place of a bfloat16 that its device only emulates. The weights' values stay what they are.

    Args:
        device: of a target whose weights are on the disk: where they come to.
    """
    return target.float() if read_in(target.dtype, device or target.device) != target.dtype else target


def read_in(saved: torch.dtype, device: torch.device) -> torch.dtype:
    """The format that a target whose weights are saved in this one reads texts in."""
    emulated = saved == torch.bfloat16 and device.type == "cpu" and not pays(device)
    return torch.float32 if emulated else saved


def summary(target: PreTrainedModel) -> str:
    """What a run computes in: it may be several times slower in the other format."""
    trained = "bfloat16" if pays(target.device) else "float32"
    return f"the target reads in {str(target.dtype).removeprefix('torch.')}, the head is trained in {trained}"


def operations_per_second(dtype: torch.dtype, device: torch.device) -> float:
    """Of a product of many rows, by the clock."""
    if device.type == "cpu":
        return 2 * ROWS * WIDTH**2 / _seconds(dtype)
    x = torch.ones(8 * WIDTH, 8 * WIDTH, dtype=dtype, device=device)
    torch.nn.functional.linear(x, x)
    torch.accelerator.synchronize(device)
    start = perf_counter()
    for _ in range(TRIES):
        torch.nn.functional.linear(x, x)
    torch.accelerator.synchronize(device)
    return 2 * len(x) ** 3 * TRIES / (perf_counter() - start)


def _seconds(dtype: torch.dtype) -> float:
    """Of the CPU for a product of many rows."""
    timings = _timings()
    return timings[dtype] if dtype in timings else min(_product(dtype) for _ in range(TRIES))


@cache
def _timings() -> dict[torch.dtype, float]:
    """Of float32 and bfloat16, taking turns: the best of a few. A training's speed hangs on who wins."""
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    for tries in range(1, 1 + MOST_TRIES):
        best = {dtype: min(seconds, _product(dtype)) for dtype, seconds in best.items()}
        if tries >= TRIES and max(best.values()) > CLEAR * min(best.values()):
            break
    return best


def _product(dtype: torch.dtype) -> float:
    x, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
    start = perf_counter()
    torch.nn.functional.linear(x, weight)
    return perf_counter() - start
