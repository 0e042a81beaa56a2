"""Planning makes many small objects at once, none of them in cycles: the cyclic collector would look at all that
the process holds, again and again, for nothing. With a framework imported that was half of the time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_users = 0
_was_enabled = False


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keeps the cyclic collector from running in this process, as it was after the last one has left: while the caller
    plans or is blocked. Objects that are gone by then cost nothing, so leave it behind them."""
    global _users, _was_enabled
    with _lock:
        if not _users:
            _was_enabled = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _was_enabled:
                gc.enable()
