"""`bad_input_ends`: ends a benchmark on bad input with an error message instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

log = Console(stderr=True, highlight=False)


@contextmanager
def bad_input_ends() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:  # OSError: no such model or file
        log.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
