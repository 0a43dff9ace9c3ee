"""Number formats in which heads are trained and targets are run, chosen by measuring this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter

import torch
from transformers import PreTrainedModel
from transformers.utils import is_torch_bf16_gpu_available

from specdec.models.number_format import convert

ROWS, WIDTH, TRIES = 512, 1024, 3  # size of the measured product, and measurements
UNCACHED = 2**25  # numbers of a matrix that no cache holds: products of few rows are as fast as the memory
# Other programs disturb: measure up to MOST_TRIES times, until one format is CLEAR times faster.
MOST_TRIES, CLEAR = 20, 2.0


def bfloat16_is_faster(device: torch.device) -> bool:
    """Return whether matrix products are faster in bfloat16. CPUs without a bfloat16 unit are many times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return is_torch_bf16_gpu_available()
    return _seconds(torch.bfloat16) < _seconds(torch.float32)


@contextmanager
def without_denormals() -> Iterator[None]:
    """Flush numbers below 1e-38 to 0.

    Gradients of tokens outside all drafts are full of such numbers, and CPUs multiply them many times slower.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def in_fastest_dtype(target: PreTrainedModel, device: torch.device | None = None) -> PreTrainedModel:
    """Convert a target from bfloat16 to float32 if its device only emulates bfloat16. The values do not change.

    A quantised target stays as it is.

    device: device on which weights from the disk will be used. None: the target's device.
    """
    return convert(target, running_dtype(target.dtype, device or target.device))


def running_dtype(saved: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the format in which a target runs, given the format of its checkpoint."""
    emulated = saved == torch.bfloat16 and device.type == "cpu" and not bfloat16_is_faster(device)
    return torch.float32 if emulated else saved


def summary(target: PreTrainedModel) -> str:
    """Describe the formats of a run. The other format may be several times slower."""
    trained = "bfloat16" if bfloat16_is_faster(target.device) else "float32"
    return f"the target reads in {str(target.dtype).removeprefix('torch.')}, the head is trained in {trained}"


def operations_per_second(dtype: torch.dtype, device: torch.device, rows: int | None = None) -> float:
    """Measure the floating-point operations per second of a product. rows: number of its rows; None: many."""
    if device.type == "cpu":
        if rows is None:
            return 2 * ROWS * WIDTH**2 / _seconds(dtype)
        height = UNCACHED // WIDTH
        return 2 * rows * WIDTH * height / min(_product(dtype, rows, height) for _ in range(TRIES))
    weight = torch.ones(8 * WIDTH, 8 * WIDTH, dtype=dtype, device=device)
    x = weight[:rows]
    torch.nn.functional.linear(x, weight)
    torch.accelerator.synchronize(device)
    start = perf_counter()
    for _ in range(TRIES):
        torch.nn.functional.linear(x, weight)
    torch.accelerator.synchronize(device)
    return 2 * len(x) * len(weight) ** 2 * TRIES / (perf_counter() - start)


def _seconds(dtype: torch.dtype) -> float:
    """Measure the seconds that the CPU takes for a product of many rows."""
    timings = _timings()
    return timings[dtype] if dtype in timings else min(_product(dtype) for _ in range(TRIES))


@cache
def _timings() -> dict[torch.dtype, float]:
    """Measure float32 and bfloat16 in turns, and return the best seconds of each. Training speed depends on it."""
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    for tries in range(1, 1 + MOST_TRIES):
        best = {dtype: min(seconds, _product(dtype)) for dtype, seconds in best.items()}
        if tries >= TRIES and max(best.values()) > CLEAR * min(best.values()):
            break
    return best


def _product(dtype: torch.dtype, rows: int = ROWS, height: int = WIDTH) -> float:
    x, weight = torch.ones(rows, WIDTH, dtype=dtype), torch.ones(height, WIDTH, dtype=dtype)
    start = perf_counter()
    torch.nn.functional.linear(x, weight)
    return perf_counter() - start
