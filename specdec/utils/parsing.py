"""Files that somebody else wrote: `parsed`, JSON, and `read_by_library`, files that a library reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def parsed(text: str | bytes, place: str) -> Any:
    """The value that a JSON text holds.

    Args:
        place: where it stands, for errors.

    Raises:
        ValueError: it is not JSON in UTF-8, or nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except ValueError as error:  # also of bytes that are not UTF-8
        raise ValueError(f"{place} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{place} cannot be read: its JSON is nested too deeply") from error


@contextmanager
def read_by_library(place: str | Path) -> Iterator[None]:
    """A library reads files within: whatever it comes upon in damaged ones becomes a ValueError that names them.

    What it says in words of its own (ValueError, OSError, ImportError) stays, and so does a lack of memory.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):
            raise
        raise ValueError(
            f"{place} cannot be read ({type(error).__name__}: {error}): it is damaged, or not what it is taken for. "
            "Get it, or have it made, anew"
        ) from error
