"""`interruptible`: lets another thread end a long prefill. Stopping criteria are asked only after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, get_ident
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook


class Cancelled(BaseException):
    """Raised in the model's forward pass when nobody waits for its result. Not an Exception: no code may handle it."""


@contextmanager
def interruptible(cancelled: Event) -> Iterator[Callable[[], None]]:
    """Raise `Cancelled` at the next module that this thread runs within this context, once `cancelled` is set.

    torch's hook for all modules is used. It reaches every view of the model, and leaves the model itself unchanged.

    Yields:
        A function that removes the hook, for the time after the prefill.
    """
    thread = get_ident()

    def check(module: Any, arguments: Any) -> None:
        if cancelled.is_set() and get_ident() == thread:
            raise Cancelled

    hook = register_module_forward_pre_hook(check)
    try:
        yield hook.remove
    finally:
        hook.remove()
