"""Sharing of one process's result with all processes that were started together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

T = TypeVar("T")


def from_first_process(found: Callable[[], T]) -> T:
    """Return the first process's result of `found` in all processes. All of them must call this."""
    processes = PartialState()
    results = [found() if processes.is_main_process else None]
    if processes.num_processes > 1:
        broadcast_object_list(results)
    return results[0]  # type: ignore[return-value]
