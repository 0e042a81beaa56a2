"""Planning makes many small objects at once, none of them in cycles: the cyclic collector would look at all that
the process holds, again and again, for nothing. With a framework imported that was half of the time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hyper_ckpt.fork_safety import reset_in_children


class _Collector:
    """Who has paused the collector, and how it was before the first did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused_by: set[object] = set()
        self._was_enabled = False

    def pause(self, who: object) -> None:
        with self._lock:
            if not self._paused_by:
                self._was_enabled = gc.isenabled()
            self._paused_by.add(who)
            gc.disable()

    def go_on(self, who: object) -> None:
        """Also where `pause` was interrupted."""
        with self._lock:
            paused = who in self._paused_by
            self._paused_by.discard(who)
            if paused and not self._paused_by and self._was_enabled:
                gc.enable()

    def reset_after_fork(self) -> None:
        """The threads that paused it are not in the child."""
        self._lock = threading.Lock()
        if self._paused_by and self._was_enabled:
            gc.enable()
        self._paused_by.clear()


_COLLECTOR = _Collector()
reset_in_children(_COLLECTOR)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keeps the cyclic collector from running in this process, as it was after the last one has left: while the caller
    plans or is blocked. Objects that are gone by then cost nothing, so leave it behind them."""
    who = object()
    try:
        _COLLECTOR.pause(who)
        yield
    finally:
        _COLLECTOR.go_on(who)
