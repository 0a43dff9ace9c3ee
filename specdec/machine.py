"""The machine at hand: its best device, and the number format that it computes in."""

from __future__ import annotations

from pathlib import Path

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def best_device() -> torch.device:
    """A GPU if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def number_format(dtype: str, device: torch.device) -> torch.dtype:
    """`dtype` by its name, "auto" for the best one."""
    if dtype == "auto":
        return best_dtype(device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r} where one of auto, {', '.join(DTYPES)} was expected")
    return DTYPES[dtype]


def best_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware computes in it; elsewhere it is emulated, and another format is faster."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    if device.type == "cpu" and not cpu_has_bfloat16():
        return torch.float32
    return torch.bfloat16


def computed_in(saved: torch.dtype, device: torch.device) -> torch.dtype:
    """The format to compute in with weights of `saved`: float32 where the CPU only emulates bfloat16, in which a pass
    over many rows takes several times as long (22 against 3.7 single tokens' passes for 32 rows of a 0.5B)."""
    emulated = device.type == "cpu" and saved == torch.bfloat16 and not cpu_has_bfloat16()
    return torch.float32 if emulated else saved


def cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 (AVX512-BF16 or AMX on x86, BF16 on ARM)."""
    # torch 2.9 to 2.13 know x86's under private names; ARM's flag is in /proc/cpuinfo alone.
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if probe is not None and probe():
        return True
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
