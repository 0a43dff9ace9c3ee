"""Launches of Triton kernels, and the devices and tensors that they run on.

Imports no triton: it ships with torch's CUDA builds only. The other modules of this package need it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of tensors that the kernels take
WARPS = 16  # most warps per program


def interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU instead of compiling them; slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def compiles_for(device: torch.device) -> bool:
    """Return whether Triton, where it is installed, compiles kernels for a device."""
    return device.type == "cuda" and torch.backends.cuda.is_built()


def available(device: torch.device) -> bool:
    """Return whether Triton kernels run on tensors of a device."""
    if find_spec("triton") is None:
        return False
    return device.type == "cpu" if interpreted() else compiles_for(device)


def fits(*tensors: Tensor) -> bool:
    """Return whether kernels take these tensors: not empty, one dtype of `DTYPES`, one device, no gradients."""
    first = tensors[0]
    return (
        not torch.is_grad_enabled()
        and first.dtype in DTYPES
        and not torch.is_autocast_enabled(first.device.type)
        and all(given.dtype == first.dtype and given.device == first.device and given.numel() for given in tensors)
    )


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument, a tensor.

    Products and sums are not contracted: each operation rounds as torch's kernels do one by one.
    """
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, num_warps=warps, enable_fp_fusion=False, **constants)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
