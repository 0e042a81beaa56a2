"""Something that happens once and is waited for, whatever interrupts those that wait."""

from __future__ import annotations

import threading
import time

_LOOK_SECONDS = 1.0


class Latch:
    """As a `threading.Event` that is never cleared.

    A KeyboardInterrupt inside of an Event may leave the Event's lock taken: then `set` never returns in any thread, and
    whoever waits, waits for ever. Here one that was interrupted delays others by a second at most.
    """

    def __init__(self) -> None:
        self._lock, self._is_set = threading.Lock(), False
        self._lock.acquire()

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """It has happened; also again."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Returns once it has happened, or False after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = _LOOK_SECONDS if until is None else until - time.monotonic()
            if left <= 0:
                break
            # Not for longer: one that was interrupted behind `acquire` gives the lock to nobody.
            if self._lock.acquire(timeout=min(left, _LOOK_SECONDS)):
                self._lock.release()
        return self._is_set
