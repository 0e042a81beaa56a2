"""Saves of one platform that are being finished in the background, in the order in which they were called."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from hyper_ckpt.engine.latch import Latch
from hyper_ckpt.errors import SaveInFlightError
from hyper_ckpt.fork_safety import reset_in_children


class Background(Protocol):
    """A save that was started."""

    checkpoint_id: str
    timeout: float

    def done(self) -> bool: ...

    def unseen_failure(self) -> BaseException | None:
        """Why it failed, if it did and nobody has been told; from now on somebody was."""


class _Open:
    """A save that was called, until it is over on this rank.

    Args:
        number: counts the saves of a platform from 1.
        save: what was started.
        finish: does the rest of it, and raises only what interrupts this thread.
    """

    def __init__(self, number: int, save: Background, finish: Callable[[], None]) -> None:
        self.number, self.save, self._finish = number, save, finish
        self.over = Latch()
        self._takers: list[int] = []  # threads; the first one finishes it

    @property
    def is_taken(self) -> bool:
        """Whether a thread has begun to finish it."""
        return bool(self._takers)

    @property
    def is_open(self) -> bool:
        """Whether to wait for it. One that this very thread took is not: it is done below, or was interrupted."""
        return not self.over.is_set() and not (self._takers and self._takers[0] == threading.get_ident())

    def finish(self) -> None:
        """Finishes it, unless another thread does."""
        own = threading.get_ident()
        try:
            self._takers.append(own)
            if self._takers[0] == own:
                self._finish()
        finally:
            if self._takers and self._takers[0] == own:
                self.over.set()


class InFlight:
    """Finishes saves one after another in one thread, and knows those that are not over. Of saves that failed, the
    failure is kept until somebody is told.

    The caller's thread may be interrupted (KeyboardInterrupt) between any two lines. So it takes no locks here that it
    could leave taken, a save is open from the one step on that appends it, and whoever waits for a save sees to it
    that a thread is there which finishes it.
    """

    def __init__(self) -> None:
        self.reset_after_fork()
        reset_in_children(self)
        _ALIVE.add(self)

    def reset_after_fork(self) -> None:
        """The saves of the parent are the parent's, and so is their thread."""
        self._saves: list[_Open] = []  # open, or over and not looked at by `failure`
        self._numbers, self._submitted = itertools.count(1), 0
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._working = threading.Lock()  # held by the thread that finishes saves, while it does
        self._closing = False

    def wait_over(self, checkpoint_id: str, timeout: float) -> None:
        """Waits until no save to this place is open.

        Raises:
            SaveInFlightError: it took longer than `timeout`.
        """
        until = time.monotonic() + _seconds(timeout)
        for each in self._open():
            if each.save.checkpoint_id == checkpoint_id and not self._is_over(each, until):
                raise SaveInFlightError(f"an earlier save to {checkpoint_id} is still in flight after {timeout:g} s")

    def wait_room(self, most: int, timeout: float) -> float:
        """Waits until fewer than `most` saves are open.

        Returns:
            Seconds that it took.

        Raises:
            SaveInFlightError: it took longer than `timeout`.
        """
        begin = time.monotonic()
        while len(found := self._open()) >= most:
            if not self._is_over(found[-most], begin + _seconds(timeout)):
                raise SaveInFlightError(
                    f"the save to {found[0].save.checkpoint_id} is still in flight after {timeout:g} s, and "
                    f"{len(found)} of at most {most} saves may be: save less often, or raise max_in_flight"
                )
        return time.monotonic() - begin

    def submit(self, save: Background, finish: Callable[[], None]) -> None:
        """Queues a save; `finish` does the rest of it, and raises only what interrupts the thread, e.g. a
        KeyboardInterrupt. Where the interpreter is ending, or lets no thread begin, it is done at once."""
        own = _Open(next(self._numbers), save, finish)
        self._saves.append(own)
        self._submitted = own.number
        if self._closing:
            own.finish()
        else:
            self._see_to_it()
            self._arrived.put(None)

    def failure(self, most: int = 1) -> BaseException | None:
        """The failure of an earlier save of which nobody was told yet.

        Args:
            most: as for `wait_room`, which came before: only saves that are over on every rank by now are looked at, so
                that all ranks hear of a failure in the same call.
        """
        for each in self._saves.copy():
            if not each.is_open and each.number <= self._submitted + 1 - most:
                with contextlib.suppress(ValueError):  # another thread looked at it
                    self._saves.remove(each)
                error = each.save.unseen_failure()
                if error is not None:
                    return error
        return None

    def drain(self) -> None:
        """At the end of the interpreter: waits for what is in flight, as long as its own timeout, and reports."""
        self._closing = True  # other threads may still call: what they save is done in their time
        while found := self._open():
            first = found[0]
            if not self._is_over(first, time.monotonic() + _seconds(first.save.timeout)):
                _say(f"the save to {first.save.checkpoint_id} was not over when the process ended: it is not published")
                break
        self._say_failures()

    def _open(self) -> list[_Open]:
        """In the order of the calls."""
        return [each for each in self._saves.copy() if each.is_open]

    def _is_over(self, each: _Open, until: float) -> bool:
        """Whether it is over before a time of the monotonic clock. Has it finished."""
        self._see_to_it()
        return each.over.wait(until - time.monotonic())

    def _see_to_it(self) -> None:
        """Has a thread finish all saves that are open; if none can be had, this one does."""
        if self._working.locked() or not self._has_untaken():
            return
        try:
            if _watch_exit():
                threading.Thread(target=self._run, name="hyper-ckpt-saves", daemon=True).start()
                return
        except RuntimeError:  # no memory for one more, or the interpreter is ending
            pass
        self._finish_all()

    def _has_untaken(self) -> bool:
        return any(not each.is_taken for each in self._saves.copy())

    def _finish_all(self) -> None:
        for each in self._saves.copy():
            if not each.is_taken:
                each.finish()

    def _run(self) -> None:
        """In the thread: finishes saves until there are none for a moment, so that the next save finds it. Of several
        threads one stays."""
        while self._has_untaken() and self._working.acquire(blocking=False):
            try:
                with contextlib.suppress(queue.Empty):
                    while True:
                        with contextlib.suppress(
                            BaseException
                        ):  # it interrupted the caller's thread, and was raised there
                            self._finish_all()
                        self._arrived.get(timeout=_IDLE_SECONDS)
            finally:
                self._working.release()

    def _say_failures(self) -> None:
        while (error := self.failure()) is not None:
            _say(f"a save in the background failed and nobody asked for its result: {type(error).__name__}: {error}")

    def __del__(self) -> None:
        # Nobody can ask any more: a platform that was made for one call, and forgotten.
        if hasattr(self, "_saves"):  # else it was interrupted before it was whole
            self._say_failures()


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
