"""What goes between the host and a device: copies that nobody waits for, and one that the host does wait for.

Owns pinned memory and events. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

PINNED = "cuda"  # devices whose copies from and to pinned memory need not be waited for
HOST = torch.device("cpu")
Name = TypeVar("Name")


def uploaded(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """int64 numbers, in lists of any depth, as a tensor on the device. The host goes on before they are there."""
    made = torch.tensor(numbers, dtype=torch.long, device=HOST)  # the default device may be another
    return made.pin_memory().to(device, non_blocking=True) if device.type == PINNED else made.to(device)


def sent(parts: Mapping[Name, Tensor]) -> Callable[[], dict[Name, list[Any]]]:
    """Tensors of B rows, (B,) or (B, n), int64 or float32, on their way to the host: from a device in one copy.

    Returns:
        waits for them, and gives them as lists. What the device is asked for meanwhile comes behind the copy.
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
