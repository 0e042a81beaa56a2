"""Saves of one platform that are being finished in the background, in the order in which they were called."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hyper_ckpt.errors import SaveInFlightError
from hyper_ckpt.fork_safety import reset_in_children


class Background(Protocol):
    """A save that was started."""

    checkpoint_id: str
    timeout: float

    def done(self) -> bool: ...

    def unseen_failure(self) -> BaseException | None:
        """Why it failed, if it did and nobody has been told; from now on somebody was."""


class InFlight:
    """One thread that finishes saves one after another, and the saves that are not over.

    Of saves that failed, the failure is kept until somebody is told.
    """

    def __init__(self) -> None:
        self.reset_after_fork()
        reset_in_children(self)
        _ALIVE.add(self)

    def reset_after_fork(self) -> None:
        """The saves of the parent are the parent's, and so is their thread."""
        self._changed = threading.Condition()
        self._queue: deque[tuple[Background, Callable[[], None]]] = deque()
        self._open: list[Background] = []
        self._ended: list[tuple[int, Background]] = []
        self._submitted = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    def wait_over(self, checkpoint_id: str, timeout: float) -> None:
        """Waits until no save to this place is open.

        Raises:
            SaveInFlightError: it took longer than `timeout`.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: all(save.checkpoint_id != checkpoint_id for save in self._open), _seconds(timeout)
            ):
                raise SaveInFlightError(f"an earlier save to {checkpoint_id} is still in flight after {timeout:g} s")

    def wait_room(self, most: int, timeout: float) -> float:
        """Waits until fewer than `most` saves are open.

        Returns:
            Seconds that it took.

        Raises:
            SaveInFlightError: it took longer than `timeout`.
        """
        begin = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._open) < most, _seconds(timeout)):
                raise SaveInFlightError(
                    f"the save to {self._open[0].checkpoint_id} is still in flight after {timeout:g} s, and "
                    f"{len(self._open)} of at most {most} saves may be: save less often, or raise max_in_flight"
                )
        return time.monotonic() - begin

    def submit(self, save: Background, finish: Callable[[], None]) -> None:
        """Queues a save; `finish` does the rest of it and raises nothing. Where the interpreter is ending, or lets no
        thread begin, it is done at once."""
        with self._changed:
            self._submitted += 1
            self._open.append(save)
            queued = not self._closing and _watch_exit() and self._has_thread()
            if queued:
                self._queue.append((save, finish))
                self._changed.notify_all()
        if not queued:
            finish()
            self._end(save)

    def _has_thread(self) -> bool:
        """Whether the thread runs, started if it did not."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="hyper-ckpt-saves", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no memory for one more, or the interpreter is ending
                return False
            self._thread = thread
        return True

    def failure(self, most: int = 1) -> BaseException | None:
        """The failure of an earlier save of which nobody was told yet.

        Args:
            most: as for `wait_room`, which came before: only saves that are over on every rank by now are looked at, so
                that all ranks hear of a failure in the same call.
        """
        with self._changed:
            ended = [each for each in self._ended if each[0] <= self._submitted + 1 - most]
        for each in ended:
            error = each[1].unseen_failure()
            with self._changed:
                self._ended.remove(each)
            if error is not None:
                return error
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                # A moment, so that the next save finds the thread.
                if not self._changed.wait_for(lambda: bool(self._queue), _IDLE_SECONDS):
                    self._thread = None
                    return
                save, finish = self._queue.popleft()
            finish()
            self._end(save)

    def _end(self, save: Background) -> None:
        with self._changed:
            number = self._submitted - len(self._open) + 1
            self._open.remove(save)
            self._ended.append((number, save))
            self._changed.notify_all()

    def drain(self) -> None:
        """At the end of the interpreter: waits for what is in flight, as long as its own timeout, and reports."""
        with self._changed:
            self._closing = True  # other threads may still call: what they save is done in their time
        while (first := self._first()) is not None:
            if not self._has_ended(first):
                _say(f"the save to {first.checkpoint_id} was not over when the process ended: it is not published")
                break
        while (error := self.failure()) is not None:
            _say(f"a save in the background failed and nobody asked for its result: {type(error).__name__}: {error}")

    def _first(self) -> Background | None:
        with self._changed:
            return self._open[0] if self._open else None

    def _has_ended(self, save: Background) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: save not in self._open, _seconds(save.timeout))

    def __del__(self) -> None:
        # Nobody can ask any more: a platform that was made for one call, and forgotten.
        while (error := self.failure()) is not None:
            _say(f"a save in the background failed and nobody asked for its result: {type(error).__name__}: {error}")


_ALIVE: weakref.WeakSet[InFlight] = weakref.WeakSet()
_IDLE_SECONDS = 1.0


def _seconds(timeout: float) -> float:
    return min(timeout, threading.TIMEOUT_MAX)


def _say(text: str) -> None:
    with contextlib.suppress(Exception):  # there may be no stream any more, or a closed one
        print(f"hyper_ckpt: {text}", file=sys.stderr, flush=True)


@functools.cache
def _watch_exit() -> bool:
    """Has all saves waited for at the end. False where it is too late for that."""
    # Before, not after, the interpreter refuses to start threads: writing needs some.
    register = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(_drain_all)
    except RuntimeError:
        return False
    return True


def _drain_all() -> None:
    for flight in list(_ALIVE):
        flight.drain()
