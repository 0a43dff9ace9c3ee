"""`Recent`: the results that were used last, by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Keeps up to `most` values for several threads. Keys need to be comparable, but not hashable. Copies start empty.

    Args:
        most: number of values; the one that was unused for longest is dropped.

    Examples:
        >>> sums = Recent(most=1)
        >>> sums.get([1, 2], lambda: 1 + 2), sums.get([1, 2], lambda: None), [*sums]
        (3, 3, [3])
    """

    def __init__(self, most: int):
        self.most = most
        self._kept: list[tuple[Any, Value]] = []  # the last used first
        self._lock = Lock()

    def get(self, key: Any, make: Callable[[], Value], usable: Callable[[Value], bool] = lambda value: True) -> Value:
        """Return the value of a key. It is made if there is none yet, or none that is `usable`.

        Threads that make it at the same time, which may take long, get one value.
        """
        found = self._found(key, usable)
        if found is None:
            made = make()
            found = self._found(key, usable, [made])
        assert found is not None
        return found[0]

    def _found(self, key: Any, usable: Callable[[Value], bool], made: list[Value] | None = None) -> list[Value] | None:
        """Return the key's value, or else the one that was `made`, in a list; None if there is none."""
        with self._lock:
            place = next((i for i, (known, _) in enumerate(self._kept) if known == key), None)
            found = made
            if place is not None:
                kept = self._kept.pop(place)[1]
                found = [kept] if usable(kept) else made
            if found is not None:
                self._kept.insert(0, (key, found[0]))
                del self._kept[self.most :]
            return found

    def __iter__(self) -> Iterator[Value]:
        return iter([value for _, value in self._kept])

    def __deepcopy__(self, memo: dict[int, Any]) -> Recent[Value]:
        return Recent(self.most)

    def __reduce__(self) -> tuple[type[Recent[Value]], tuple[int]]:
        return Recent, (self.most,)
