"""Copies between host and device: asynchronous uploads, and one packed download per host sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    Examples:
        >>> uploaded([[1, 2], [3, 4]], torch.device("cpu"))
        tensor([[1, 2],
                [3, 4]])
    """
    made = torch.tensor(numbers, dtype=torch.long, device=HOST)  # the default device may be another
    return made.pin_memory().to(device, non_blocking=True) if device.type == PINNED else made.to(device)


def sent(parts: Mapping[Name, Tensor]) -> Callable[[], dict[Name, list[Any]]]:
    """Start copying tensors to the host, all of them in one copy.

    Args:
        parts: tensors (B,) or (B, n), int64 or float32, by name, all on one device.

    Returns:
        A function that waits for the copy and returns the tensors as lists, by name. Work that is launched before it
        is called runs on the device after the copy.

    Examples:
        >>> lists = sent({"accepted": torch.tensor([2, 0]), "seconds": torch.tensor([[0.5], [0.25]])})
        >>> lists()
        {'accepted': [2, 0], 'seconds': [[0.5], [0.25]]}
    """
    device = next(iter(parts.values())).device
    if device.type == "cpu":
        here = {name: part.tolist() for name, part in parts.items()}
        return lambda: here
    columns = [_as_integers(part) for part in parts.values()]
    sizes, arrived = [column.shape[1] for column in columns], _sent(torch.cat(columns, 1))

    def lists() -> dict[Name, list[Any]]:
        named = zip(parts.items(), arrived().split(sizes, 1), strict=True)
        return {name: _as_list(part, column) for (name, part), column in named}

    return lists


def _sent(packed: Tensor) -> Callable[[], Tensor]:
    """Start copying one tensor to the host; the returned function waits for it."""
    if packed.device.type != PINNED:
        return lambda: packed.to(HOST)
    here = torch.empty(packed.shape, dtype=packed.dtype, device=HOST).pin_memory()
    here.copy_(packed, non_blocking=True)
    event = torch.get_device_module(packed.device).Event()
    event.record()

    def arrived() -> Tensor:
        event.synchronize()
        return here

    return arrived


def _as_integers(part: Tensor) -> Tensor:
    part = part[:, None] if part.dim() == 1 else part
    return part.contiguous().view(torch.int).long() if part.is_floating_point() else part  # the same bits


def _as_list(part: Tensor, column: Tensor) -> list[Any]:
    column = column[:, 0] if part.dim() == 1 else column
    return (column.int().view(torch.float) if part.is_floating_point() else column).tolist()
