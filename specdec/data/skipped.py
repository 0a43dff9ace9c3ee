"""`Skipped`: collects entries that cannot be used, and reports them once with their locations."""

from __future__ import annotations

import warnings

NAMED = 3  # entries that a message lists
LONGEST = 300  # maximum characters of a reason


class Skipped:
    """Counts entries that cannot be used, and keeps the locations and reasons of the first few.

    Args:
        what: noun for the entries, in the plural.
        verb: verb phrase of the warning.
    """

    def __init__(self, what: str, verb: str = "were left out"):
        self.what, self.verb, self.count = what, verb, 0
        self._first: list[str] = []

    def add(self, place: str, why: Exception | str) -> None:
        self.count += 1
        if self.count <= NAMED:
            reason = str(why)
            self._first.append(f"{place}: {reason[:LONGEST]}" + " ..." * (len(reason) > LONGEST))

    def check(self, left: int) -> None:
        """Raise ValueError if no usable entries are left."""
        if not left:
            raise ValueError(f"none of {self.count} {self.what} can be used:{self._named()}")

    def warn(self, left: int) -> None:
        """Warn about the entries left out. Call it after reading all entries."""
        if self.count:
            warnings.warn(f"{self.count} of {self.count + left} {self.what} {self.verb}:{self._named()}")

    def check_and_warn(self, left: int) -> None:
        """Raise ValueError if no usable entries are left; otherwise warn about those left out."""
        self.check(left)
        self.warn(left)

    def _named(self) -> str:
        more = [f"and {self.count - NAMED} more"] if self.count > NAMED else []
        return "".join(f"\n  {line}" for line in (*self._first, *more))
