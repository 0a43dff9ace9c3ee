"""Read files that other programs wrote, with errors that name the file: `parsed` for JSON, `read_by_library`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def parsed(text: str | bytes, place: str) -> Any:
    """Parse a JSON text.

    Args:
        text: the JSON text.
        place: where the text comes from, for errors.

    Raises:
        ValueError: the text is not JSON in UTF-8, or it is nested too deeply.

    Examples:
        >>> parsed('{"a": [1, 2]}', "config.json")
        {'a': [1, 2]}
    """
    try:
        return json.loads(text)
    except ValueError as error:  # also of bytes that are not UTF-8
        raise ValueError(f"{place} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{place} cannot be read: its JSON is nested too deeply") from error


@contextmanager
def read_by_library(place: str | Path) -> Iterator[None]:
    """Turn the errors of a library that reads a damaged file into a ValueError that names the file.

    Errors with a message for users (ValueError, OSError, ImportError) are passed through, and so are memory errors.

    Args:
        place: path or name of what is read.

    Raises:
        ValueError: any other error was raised within the context.

    Examples:
        >>> with read_by_library("weights.bin"):  # doctest: +ELLIPSIS
        ...     {}["header"]
        Traceback (most recent call last):
        ...
        ValueError: weights.bin cannot be read (KeyError: 'header'): it is damaged, or ...
    """
    try:
        yield
    except (ValueError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):
            raise
        raise ValueError(
            f"{place} cannot be read ({type(error).__name__}: {error}): it is damaged, or not of the expected type. "
            "Download or create it again"
        ) from error
