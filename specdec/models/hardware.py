"""Properties of this machine: its best device, its available memory, and the fastest dtype."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from specdec.models.cpu_threads import usable_cores
from specdec.models.linear import TRIES, FastLinear
from specdec.utils.choices import NumberFormat, check_choice

if TYPE_CHECKING:
    from accelerate import PartialState

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INTO, OUT = 1024, 2048  # inputs and outputs of the linear layer that dtypes are timed on
DECODING = (1, 8)  # tokens in a pass without and with a draft
CROWDED = 2.0  # the time of all threads, relative to one thread, from which on other programs use the cores
WORTH_ITS_MEMORY = 0.9  # float32 takes twice the memory: it must need less than this share of bfloat16's time


def best_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def started_together(on_cpu: bool = False) -> PartialState:
    """The process group started by `accelerate launch` or torchrun, with a timeout of one day.

    Processes that finish early wait for the others.

    Args:
        on_cpu: use the CPU even if there is an accelerator.
    """
    from accelerate import PartialState

    return PartialState(cpu=on_cpu or best_device().type == "cpu", timeout=timedelta(days=1))


def number_format(dtype: NumberFormat | str, device: torch.device) -> torch.dtype:
    """The torch dtype of a name; "auto" is the best one for the device."""
    check_choice("dtype", dtype, NumberFormat)
    return best_dtype(device) if dtype == "auto" else DTYPES[dtype]


def best_dtype(device: torch.device) -> torch.dtype:
    """bfloat16, or where it is emulated: float16 on a GPU, float32 on a CPU on which it is measured to be faster."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return computed_in(torch.bfloat16, device)


def computed_in(saved: torch.dtype, device: torch.device, rows: Sequence[int] = DECODING) -> torch.dtype:
    """The dtype to compute in for weights saved as `saved`: float32 instead of bfloat16 on a CPU that is faster in it.

    Args:
        saved: dtype of the saved weights.
        device: device to compute on.
        rows: numbers of tokens per pass to time; by default one token, and one with a short draft.
    """
    if device.type != "cpu" or saved != torch.bfloat16:
        return saved
    exact, half = (layer_seconds(dtype, rows) for dtype in (torch.float32, torch.bfloat16))
    return torch.float32 if exact < WORTH_ITS_MEMORY * half else saved


def layer_seconds(dtype: torch.dtype, rows: Sequence[int] = DECODING) -> float:
    """Seconds of passes over these numbers of tokens through one linear layer."""
    return sum(product_seconds(dtype, n) for n in rows)


@cache
def name_of(device: torch.device) -> str:
    """Hardware identifier for stored timings: GPU name, or CPU model and SIMD instruction set."""
    if device.type != "cpu":
        module = getattr(torch, device.type, None)  # None for "meta", where accelerate keeps offloaded weights
        named = getattr(module, "get_device_name", None)
        return named(device) if named else device.type
    return f"{_cpu()}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu() -> str:
    """The CPU's model name on Linux; elsewhere the processor name that Python reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def format_for(
    dtype: NumberFormat | str, saved: torch.dtype, device: torch.device, numbers: int = 0
) -> tuple[torch.dtype, str]:
    """The dtype to compute in for weights saved as `saved`, and the reason.

    Args:
        dtype: name of the dtype. "auto" replaces bfloat16 with the fastest dtype, and keeps any other as saved.
        saved: dtype of the saved weights.
        device: device to compute on.
        numbers: number of weights. float32 instead of bfloat16 needs twice as many bytes of available memory.
    """
    if dtype != "auto":
        return number_format(dtype, device), "as asked for"
    if saved != torch.bfloat16:
        return saved, "as saved"
    best, available = best_dtype(device), available_memory()
    if best == torch.float32 and available is not None and available < 2 * numbers:
        return saved, f"as saved: float32 takes {2 * numbers / 1e9:.1f} GB more, {available / 1e9:.1f} GB are available"
    return best, summary(device) or ("as saved" if best == saved else "bfloat16 is emulated on this device")


def available_memory() -> int | None:
    """Bytes of memory available to a new program; None if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        # Total memory: macOS frees much of the used memory under pressure, but does not report how much.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None  # Windows


def summary(device: torch.device) -> str:
    """Say why `best_dtype` is the best on a CPU, with the timings that decide it; empty for other devices."""
    if device.type != "cpu":
        return ""
    best, other = best_dtype(device), torch.bfloat16
    if best == other:
        other = torch.float32
    taken, others = (layer_seconds(dtype) for dtype in (best, other))
    name = str(other).removeprefix("torch.")
    why = f"faster than {name} here" if taken < others else f"as fast as {name} here, in half the memory"
    return f"{why} (a test layer takes {1e3 * taken:.3g} ms, in {name} {1e3 * others:.3g})"


def crowded(device: torch.device) -> str:
    """A warning if one thread is faster than several because other programs use the CPU's cores; else empty.

    torch's threads wait for each other at every operation.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or threads > usable_cores():  # `warn_of_excess_threads` warns of these
        return ""
    together = min(map(mean, product_times(torch.float32, 1)))
    torch.set_num_threads(1)
    try:
        alone = min(map(mean, product_times(torch.float32, 1)))
    finally:
        torch.set_num_threads(threads)
    if together < CROWDED * alone:
        return ""
    return (
        f"other programs use this machine's cores: a matrix product takes {1e3 * together:.2g} ms with {threads} "
        f"threads and {1e3 * alone:.2g} ms with one. Timings are unreliable; set OMP_NUM_THREADS=1 to run faster"
    )


@cache
def product_seconds(dtype: torch.dtype, rows: int) -> float:
    """Seconds that the CPU's fastest kernel takes for a linear layer of this dtype over this number of rows.

    The fastest of many products counts, because other programs interrupt most of them on a busy machine.
    """
    return min(map(min, product_times(dtype, rows)))


def product_times(dtype: torch.dtype, rows: int) -> list[list[float]]:
    """Measure the seconds of products, which takes a tenth of a second: by turn, then by layer.

    Several layers run in turns, so that their weights are read from memory as in a model, not from the CPU's cache.
    """
    layers = [FastLinear(INTO, OUT, bias=False, dtype=dtype, device="meta").to_empty(device="cpu") for _ in range(8)]
    x = torch.ones(rows, INTO, dtype=dtype)
    taken: list[list[float]] = []
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(0.01)
        for _ in range(2 * TRIES):
            taken.append([])
            for layer in layers:
                start = perf_counter()
                layer(x)
                taken[-1].append(perf_counter() - start)
    return taken
