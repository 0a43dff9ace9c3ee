"""What goes between the host and a device: copies that nobody waits for, and one that the host does wait for.

Owns pinned memory and events. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def brought(parts: Mapping[Name, Tensor]) -> dict[Name, list[Any]]:
    """Tensors of B rows, (B,) or (B, n), int64 or float32, as lists: from a device in one copy, waited for once."""
    device = next(iter(parts.values())).device
    if device.type == "cpu":
        return {name: part.tolist() for name, part in parts.items()}
    columns = [_as_integers(part) for part in parts.values()]
    arrived = _arrived(torch.cat(columns, 1)).split([column.shape[1] for column in columns], 1)
    return {name: _as_list(part, column) for (name, part), column in zip(parts.items(), arrived, strict=True)}


def _arrived(packed: Tensor) -> Tensor:
    if packed.device.type != PINNED:
        return packed.to(HOST)
    here = torch.empty(packed.shape, dtype=packed.dtype, device=HOST).pin_memory()
    here.copy_(packed, non_blocking=True)
    event = torch.get_device_module(packed.device).Event()
    event.record()
    event.synchronize()
    return here


def _as_integers(part: Tensor) -> Tensor:
    part = part[:, None] if part.dim() == 1 else part
    return part.contiguous().view(torch.int).long() if part.is_floating_point() else part  # the same bits


def _as_list(part: Tensor, column: Tensor) -> list[Any]:
    column = column[:, 0] if part.dim() == 1 else column
    return (column.int().view(torch.float) if part.is_floating_point() else column).tolist()
