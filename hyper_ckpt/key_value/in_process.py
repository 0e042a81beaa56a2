"""A key-value store in the memory of one process: for ranks that are threads, and what a server shows to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from hyper_ckpt.contracts.platform import KeyValueStore
from hyper_ckpt.fork_safety import reset_in_children


@dataclass(frozen=True, eq=False)
class Watch:
    """A call that waits until one of `keys` is set; `ready` is then called, once, by the thread that sets it."""

    keys: tuple[str, ...]
    ready: Callable[[], None]


class InProcessKeyValueStore(KeyValueStore):
    """Values in a dict, for all threads of this process. A call that waits costs nothing until its key is set."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """The threads that held the lock, or waited, are the parent's."""
        self._lock = threading.Lock()
        self._watches: dict[str, set[Watch]] = {}

    def set_many(self, items: Mapping[str, bytes]) -> None:
        with self._lock:
            self._values.update({key: bytes(value) for key, value in items.items()})
            woken = self._woken(items)
        for watch in woken:
            watch.ready()

    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        keys, deadline = tuple(keys), time.monotonic() + timeout
        while True:
            arrived = threading.Event()
            found = self.found_or_watched(watch := Watch(keys, arrived.set), register=timeout > 0)
            remaining = deadline - time.monotonic()
            if found or remaining <= 0:
                self.forget(watch)
                return found
            try:
                arrived.wait(min(remaining, threading.TIMEOUT_MAX))
            finally:
                self.forget(watch)

    def delete(self, *keys: str) -> None:
        with self._lock:
            for key in keys:
                self._values.pop(key, None)

    def delete_prefix(self, prefix: str) -> None:
        with self._lock:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 where there is none yet. Returns the sum.

        Raises:
            ValueError: the value is no number.
        """
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % total
            woken = self._woken([key])
        for watch in woken:
            watch.ready()
        return total

    def keys(self) -> list[str]:
        """All keys that are set."""
        with self._lock:
            return list(self._values)

    def found_or_watched(self, watch: Watch, register: bool = True) -> dict[str, bytes]:
        """Those of the watch's keys that are set; where none is, the watch is kept until one is, or `forget`."""
        with self._lock:
            found = {key: self._values[key] for key in watch.keys if key in self._values}
            if not found and register:
                for key in watch.keys:
                    self._watches.setdefault(key, set()).add(watch)
            return found

    def forget(self, watch: Watch) -> None:
        """Ends a watch; one that has ended is fine."""
        with self._lock:
            self._remove(watch)

    def _woken(self, keys: Collection[str]) -> list[Watch]:
        woken = {id(watch): watch for key in keys for watch in self._watches.get(key, ())}
        for watch in woken.values():
            self._remove(watch)
        return list(woken.values())

    def _remove(self, watch: Watch) -> None:
        for key in watch.keys:
            watches = self._watches.get(key)
            if watches is not None:
                watches.discard(watch)
                if not watches:
                    del self._watches[key]
