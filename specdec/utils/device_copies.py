"""Copies between host and device: asynchronous uploads, and one packed download per host sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

PINNED = "cuda"  # device type whose copies from and to pinned memory are asynchronous
HOST = torch.device("cpu")
Name = TypeVar("Name")


def uploaded(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Copy integers to the device without waiting for the copy.

    Args:
        numbers: integers, in lists nested to any depth.
        device: the device to copy to.

    Returns:
        An int64 tensor with the shape of the nested lists.

    Raises:
        RuntimeError: a CUDA graph is being captured. It would copy these numbers again at every replay.

    Examples:
        >>> uploaded([[1, 2], [3, 4]], torch.device("cpu"))
        tensor([[1, 2],
                [3, 4]])
    """
    return moved(torch.tensor(numbers, dtype=torch.long, device=HOST), device)  # the default device may be another


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device without waiting for the copy; the tensor itself if it is there already.

    Examples:
        >>> moved(torch.tensor([1, 2]), torch.device("cpu"))
        tensor([1, 2])
    """
    if device.type != PINNED or tensor.device.type != HOST.type:
        return tensor.to(device)
    _refuse_in_capture(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def write_into(target: Tensor, numbers: Sequence[int]) -> None:
    """Copy integers into a tensor (n,) int64 on any device without waiting for the copy.

    Examples:
        >>> text = torch.zeros(4, dtype=torch.long)
        >>> write_into(text[1:3], [5, 6])
        >>> text
        tensor([0, 5, 6, 0])
    """
    made = torch.tensor(numbers, dtype=torch.long, device=HOST)
    if target.device.type == PINNED:
        _refuse_in_capture(target.device)
        made = made.pin_memory()
    target.copy_(made, non_blocking=True)


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one within a context: kernels and events go to the current device by default.

    Examples:
        >>> with as_current(torch.device("cpu")):  # nothing to do
        ...     pass
    """
    return torch.cuda.device(device) if device.type == PINNED else nullcontext()


def sent(parts: Mapping[Name, Tensor]) -> Callable[[], dict[Name, list[Any]]]:
    """Start copying tensors to the host, all of them in one copy.

    Args:
        parts: tensors (B,) or (B, n), int64 or float32, by name, on the host or on one device.

    Returns:
        A function that waits for the copy and returns the tensors as lists, by name. Work that is launched before it
        is called runs on the device after the copy.

    Examples:
        >>> lists = sent({"accepted": torch.tensor([2, 0]), "seconds": torch.tensor([[0.5], [0.25]])})
        >>> lists()
        {'accepted': [2, 0], 'seconds': [[0.5], [0.25]]}
    """
    here = {name: part.tolist() for name, part in parts.items() if part.device.type == HOST.type}
    parts = {name: part for name, part in parts.items() if name not in here}
    if not parts:
        return lambda: here
    columns = [_as_integers(part) for part in parts.values()]
    sizes, arrived = [column.shape[1] for column in columns], _sent(torch.cat(columns, 1))

    def lists() -> dict[Name, list[Any]]:
        named = zip(parts.items(), arrived().split(sizes, 1), strict=True)
        return here | {name: _as_list(part, column) for (name, part), column in named}

    return lists


def _sent(packed: Tensor) -> Callable[[], Tensor]:
    """Start copying one tensor to the host; the returned function waits for it."""
    if packed.device.type != PINNED:
        return lambda: packed.to(HOST)
    _refuse_in_capture(packed.device)
    here = torch.empty(packed.shape, dtype=packed.dtype, device=HOST).pin_memory()
    here.copy_(packed, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(packed.device))  # the current device may be another

    def arrived() -> Tensor:
        event.synchronize()
        return here

    return arrived


def _refuse_in_capture(device: torch.device) -> None:
    if device.type == PINNED and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a copy between host and device is not permitted while a CUDA graph is captured")


def _as_integers(part: Tensor) -> Tensor:
    part = part[:, None] if part.dim() == 1 else part
    return part.contiguous().view(torch.int).long() if part.is_floating_point() else part  # the same bits


def _as_list(part: Tensor, column: Tensor) -> list[Any]:
    column = column[:, 0] if part.dim() == 1 else column
    return (column.int().view(torch.float) if part.is_floating_point() else column).tolist()
