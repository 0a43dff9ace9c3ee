"""`FairQueue`: waiting requests of several clients, which take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")


class Full(Exception):
    """Raised where a queue holds as many entries as it may."""


class FairQueue(Generic[T]):
    """A bounded queue that serves its clients in turn: one entry of the first client, one of the next, and so on.

    The entries of one client keep their order. All methods may be called from any thread.

    Args:
        size: most entries.

    Examples:
        >>> queue = FairQueue(3)
        >>> for entry in ("a1", "a2", "b1"):
        ...     queue.put(entry[0], entry)
        >>> [queue.get() for _ in range(3)]
        ['a1', 'b1', 'a2']
    """

    def __init__(self, size: int):
        self.size = size
        self._lines: OrderedDict[Hashable, deque[T]] = OrderedDict()  # in the order of their turns
        self._changed = Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return self._count()

    @property
    def full(self) -> bool:
        """True if `put` would raise."""
        return len(self) >= self.size

    def put(self, client: Hashable, entry: T) -> None:
        """Append an entry of a client.

        Raises:
            Full: the queue is full, or closed.
        """
        with self._changed:
            if self._closed or self._count() >= self.size:
                raise Full
            self._lines.setdefault(client, deque()).append(entry)
            self._changed.notify()

    def put_back(self, client: Hashable, entry: T) -> bool:
        """Return an unfinished entry, at the head of its client's line, for the client's next turn.

        Returns:
            False if the queue is closed. It may be full.
        """
        with self._changed:
            if self._closed:
                return False
            self._lines.setdefault(client, deque()).appendleft(entry)
            self._lines.move_to_end(client)
            self._changed.notify()
            return True

    def get(self) -> T | None:
        """Wait for the next entry, and remove it; None if the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._lines)
            if self._closed:
                return None
            client, line = next(iter(self._lines.items()))
            entry = line.popleft()
            self._lines.move_to_end(client)
            if not line:
                del self._lines[client]
            return entry

    def remove(self, client: Hashable, entry: T) -> bool:
        """Remove an entry; False if it is not there."""
        with self._changed:
            line = self._lines.get(client, deque())
            if entry not in line:
                return False
            line.remove(entry)
            if not line:
                del self._lines[client]
            return True

    def close(self) -> list[T]:
        """End all waiting for entries, refuse new ones, and return those that are left."""
        with self._changed:
            self._closed = True
            left = [entry for line in self._lines.values() for entry in line]
            self._lines.clear()
            self._changed.notify_all()
            return left

    def _count(self) -> int:
        return sum(map(len, self._lines.values()))
