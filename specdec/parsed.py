"""`parsed`: JSON that somebody else wrote, and what is wrong with it."""

from __future__ import annotations

import json
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
