"""The values that were asked for last, a few of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(Generic[K, V]):
    """Keeps up to `most` values by key; the one that was not asked for longest goes. For any thread.

    Jobs save few different states, so that a few are enough.
    """

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """The value of a key; None if it is not kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def put(self, key: K, value: V) -> V:
        """Keeps a value, and returns it."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value

    def of(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if it is not kept."""
        found = self.get(key)
        return self.put(key, make()) if found is None else found
