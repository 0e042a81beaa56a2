"""Signs of life while ranks work for long: they tell a slow rank from a dead one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hyper_ckpt.contracts.platform import KeyValueStore
from hyper_ckpt.errors import RankTimeoutError

BEAT_SECONDS = 2.0
SILENT_SECONDS = 60.0
"""After so long without a beat a rank is dead: its process has ended, or was stopped. Long: a process may hold its
interpreter's lock for a while, e.g. in a compiler."""


@contextmanager
def beating(store: KeyValueStore, key: str) -> Iterator[None]:
    """Puts a new number under `key` every two seconds."""
    over = threading.Event()

    def beat() -> None:
        number = 1
        while not over.wait(BEAT_SECONDS):
            try:
                store.set(key, b"%d" % number)
            except RankTimeoutError:  # its host is stopped, and may go on
                continue
            except Exception:  # its host is gone: the operation will say so
                return
            number += 1

    thread = threading.Thread(target=beat, name="hyper-ckpt-heartbeat", daemon=True)
    try:
        with suppress(RuntimeError):  # the system gives no more threads: whoever was never heard is not taken for dead
            thread.start()
        if thread.ident is not None:
            store.set(key, b"0")
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
        with suppress(Exception):
            store.delete(key)


class Listener:
    """Listens for the beats of other ranks.

    Args:
        store: where beats stand.
        key_of: where each rank puts its beats.
    """

    def __init__(self, store: KeyValueStore, key_of: Callable[[int], str]) -> None:
        self._store, self._key_of = store, key_of
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._next = 0.0
        self.dead_ranks: set[int] = set()

    def dead(self, ranks: set[int]) -> bool:
        """Whether one of the ranks was heard once, and not for `SILENT_SECONDS` since. Looks now and then only."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + BEAT_SECONDS / 2
        found = self._store.get_many([self._key_of(rank) for rank in ranks])
        for rank in ranks:
            beat = found.get(self._key_of(rank))
            if beat is not None and (rank not in self._heard or self._heard[rank][0] != beat):
                self._heard[rank] = (beat, now)
        self.dead_ranks = {r for r in ranks & self._heard.keys() if now - self._heard[r][1] > SILENT_SECONDS}
        return bool(self.dead_ranks)

    def alive(self, ranks: set[int]) -> set[int]:
        """Those of the ranks that were heard lately."""
        now = time.monotonic()
        return {rank for rank in ranks & self._heard.keys() if now - self._heard[rank][1] <= SILENT_SECONDS}
