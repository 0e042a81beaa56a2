"""The bytes of host memory that one operation may hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hyper_ckpt.errors import MemoryBudgetError


class Budget:
    """A bound on bytes held at once; whoever wants more waits.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.peak = 0
        self._held = 0
        self._changed = threading.Condition()

    def require(self, nbytes: int, what: str) -> None:
        """Proves, before any I/O, that `nbytes` can be held at all.

        Raises:
            MemoryBudgetError: says how much is needed.
        """
        if nbytes > self.limit:
            raise MemoryBudgetError(
                f"{what} needs {nbytes} bytes of host memory at once: raise max_host_bytes={self.limit}"
            )

    def acquire(self, nbytes: int) -> None:
        """Waits until `nbytes` more fit."""
        self.require(nbytes, "a buffer")
        with self._changed:
            self._changed.wait_for(lambda: self._held + nbytes <= self.limit)
            self._held += nbytes
            self.peak = max(self.peak, self._held)

    def release(self, nbytes: int) -> None:
        """Gives bytes back."""
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Holds `nbytes` for a while."""
        self.acquire(nbytes)
        try:
            yield
        finally:
            self.release(nbytes)
