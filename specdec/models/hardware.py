"""The machine at hand: its best device, its memory, and the number format that it computes in."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from specdec.models.linear import TRIES, FastLinear
from specdec.utils.choices import NumberFormat, check_choice

if TYPE_CHECKING:
    from accelerate import PartialState

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INTO, OUT = 1024, 2048  # of the layer that formats are tried on
DECODING = (1, 8)  # tokens in a pass without and with a draft
CROWDED = 2.0  # times one thread's time that several take where cores are not free
WORTH_ITS_MEMORY = 0.9  # of bfloat16's time, or less: float32 takes twice the memory


def best_device() -> torch.device:
    """A GPU if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def started_together(on_cpu: bool = False) -> PartialState:
    """Those that were started together, by `accelerate launch` or torchrun. Who is done may wait for days."""
    from accelerate import PartialState

    return PartialState(cpu=on_cpu or best_device().type == "cpu", timeout=timedelta(days=1))


def number_format(dtype: NumberFormat | str, device: torch.device) -> torch.dtype:
    """`dtype` by its name, "auto" for the best one."""
    check_choice("dtype", dtype, NumberFormat)
    return best_dtype(device) if dtype == "auto" else DTYPES[dtype]


def best_dtype(device: torch.device) -> torch.dtype:
    """bfloat16, or what is faster where it is emulated: float16 on a GPU, float32 on a CPU if the clock says so."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return computed_in(torch.bfloat16, device)


def computed_in(saved: torch.dtype, device: torch.device, rows: Sequence[int] = DECODING) -> torch.dtype:
    """The format to compute in with weights of `saved`: float32 in place of bfloat16 on a CPU that is faster in it.

    Args:
        rows: tokens that the passes are over; by default a single one, and one with a short draft.
    """
    if device.type != "cpu" or saved != torch.bfloat16:
        return saved
    exact, half = (sum(product_seconds(dtype, n) for n in rows) for dtype in (torch.float32, torch.bfloat16))
    return torch.float32 if exact < WORTH_ITS_MEMORY * half else saved


@cache
def name_of(device: torch.device) -> str:
    """Of a device what its speed goes by: a GPU's name, or a CPU's and its vectors' width."""
    if device.type != "cpu":
        module = getattr(torch, device.type, None)  # none of "meta", where accelerate leaves what it offloads
        named = getattr(module, "get_device_name", None)
        return named(device) if named else device.type
    return f"{_cpu()}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu() -> str:
    """As Linux has it; elsewhere the best that Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def format_for(
    dtype: NumberFormat | str, saved: torch.dtype, device: torch.device, numbers: int = 0
) -> tuple[torch.dtype, str]:
    """The format to compute in with weights of `saved`, and why.

    Args:
        dtype: its name; "auto": what is the fastest here in place of bfloat16, everything else as saved.
        numbers: in the weights, of which twice as many bytes must be available for float32 in place of bfloat16.
    """
    if dtype != "auto":
        return number_format(dtype, device), "as asked for"
    if saved != torch.bfloat16:
        return saved, "as saved"
    best, available = best_dtype(device), available_memory()
    if best == torch.float32 and available is not None and available < 2 * numbers:
        return saved, f"as saved: float32 takes {2 * numbers / 1e9:.1f} GB more, {available / 1e9:.1f} GB are available"
    return best, summary(device) or ("as saved" if best == saved else "bfloat16 is only emulated there")


def available_memory() -> int | None:
    """Bytes of memory a new program can have; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        # All memory, used or not: macOS gives much of it back under pressure and does not say how much.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None  # Windows


def summary(device: torch.device) -> str:
    """What `best_dtype` went by, on a CPU: "1 and 8 tokens take ... in float32, ... in bfloat16"; else nothing."""
    if device.type != "cpu":
        return ""
    taken = [
        " and ".join(f"{1e3 * product_seconds(dtype, n):.2g}" for n in DECODING) + f" ms in {name}"
        for name, dtype in DTYPES.items()
        if name != "float16"
    ]
    return f"{' and '.join(map(str, DECODING))} tokens take a {INTO} x {OUT} layer " + ", ".join(taken)


def crowded(device: torch.device) -> str:
    """In words that one thread is faster here than several, as others use the CPU's cores; else nothing.

    torch's threads wait for one another at every operation.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return ""
    together = timed_product(torch.float32, 1)
    torch.set_num_threads(1)
    try:
        alone = timed_product(torch.float32, 1)
    finally:
        torch.set_num_threads(threads)
    if together < CROWDED * alone:
        return ""
    return (
        f"other programs use this machine's cores: a product takes {1e3 * together:.2g} ms with {threads} threads and "
        f"{1e3 * alone:.2g} ms with one. Timings mean little; OMP_NUM_THREADS=1 makes all of it faster"
    )


@cache
def product_seconds(dtype: torch.dtype, rows: int) -> float:
    """Of the CPU, for so many rows by a layer's weights of this type, in the best way that there is here."""
    return timed_product(dtype, rows)


def timed_product(dtype: torch.dtype, rows: int) -> float:
    """`product_seconds` now.

    Measured, in a tenth of a second: several layers take turns, so that weights come from memory as they do in a model.
    """
    layers = [FastLinear(INTO, OUT, bias=False, dtype=dtype, device="meta").to_empty(device="cpu") for _ in range(8)]
    x, taken = torch.ones(rows, INTO, dtype=dtype), []
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(0.01)
        for _ in range(2 * TRIES):
            start = perf_counter()
            for layer in layers:
                layer(x)
            taken.append((perf_counter() - start) / len(layers))
    return min(taken)
