"""`Recent`: the results that were used last, by key."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
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
        self._lock = RLock()

    def get(self, key: Any, make: Callable[[], Value], usable: Callable[[Value], bool] = lambda value: True) -> Value:
        """Return the value of a key. It is made if there is none yet, or none that is `usable`."""
        with self._lock:
            place = next((i for i, (known, _) in enumerate(self._kept) if known == key), None)
            kept = () if place is None else (self._kept.pop(place),)
            value = kept[0][1] if kept and usable(kept[0][1]) else make()
            self._kept.insert(0, (key, value))
            del self._kept[self.most :]
            return value

    def __iter__(self):
        return iter([value for _, value in self._kept])

    def __deepcopy__(self, memo: dict[int, Any]) -> Recent[Value]:
        return Recent(self.most)

    def __reduce__(self) -> tuple[type[Recent[Value]], tuple[int]]:
        return Recent, (self.most,)
