"""`common_prefix`: how far two sequences agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_prefix(one: Sequence[Any], two: Sequence[Any]) -> int:
    """Length of the common prefix of two sequences.

    Examples:
        >>> common_prefix("speculate", "special")
        4
    """
    shorter = min(len(one), len(two))
    if one[:shorter] == two[:shorter]:  # many times as fast as the search, and common
        return shorter
    return next((i for i in range(shorter) if one[i] != two[i]), shorter)
