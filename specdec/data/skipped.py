"""`LeftOut`: entries that cannot be used, said once with their places; the rest goes on without them."""

from __future__ import annotations

import warnings

NAMED = 3  # of those left out
LONGEST = 300  # characters of a reason


class LeftOut:
    """Counts entries that cannot be used, and keeps where the first few stood and why.

    Args:
        what: they are called, in the plural. happened: what a warning says of them.
    """

    def __init__(self, what: str, happened: str = "were left out"):
        self.what, self.happened, self.count = what, happened, 0
        self._first: list[str] = []

    def add(self, place: str, why: Exception | str) -> None:
        self.count += 1
        if self.count <= NAMED:
            reason = str(why)
            self._first.append(f"{place}: {reason if len(reason) <= LONGEST else reason[:LONGEST] + ' ...'}")

    def check(self, left: int) -> None:
        """Raise ValueError if none is left."""
        if not left:
            raise ValueError(f"none of {self.count} {self.what} can be used:{self._named()}")

    def warn(self, left: int) -> None:
        """Say which were left out, once all are read."""
        if self.count:
            warnings.warn(f"{self.count} of {self.count + left} {self.what} {self.happened}:{self._named()}")

    def settle(self, left: int) -> None:
        """Say which were left out; ValueError if none is left."""
        self.check(left)
        self.warn(left)

    def _named(self) -> str:
        more = [f"and {self.count - NAMED} more"] if self.count > NAMED else []
        return "".join(f"\n  {line}" for line in (*self._first, *more))
