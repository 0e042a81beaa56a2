"""Saves of one platform that are being finished in the background, in the order in which they were called."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hyper_ckpt.errors import SaveInFlightError


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
        self._changed = threading.Condition()
        self._queue: deque[tuple[Background, Callable[[], None]]] = deque()
        self._open: list[Background] = []
        self._ended: list[tuple[int, Background]] = []
        self._submitted = 0
        self._thread: threading.Thread | None = None
        self._watches_exit = False

    def wait_room(self, most: int, timeout: float) -> float:
        """Waits until fewer than `most` saves are open.

        Returns:
            Seconds that it took.

        Raises:
            SaveInFlightError: it took longer than `timeout`.
        """
        begin = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._open) < most, timeout):
                raise SaveInFlightError(
                    f"the save to {self._open[0].checkpoint_id} is still in flight after {timeout:g} s, and "
                    f"{len(self._open)} of at most {most} saves may be: save less often, or raise max_in_flight"
                )
        return time.monotonic() - begin

    def submit(self, save: Background, finish: Callable[[], None]) -> None:
        """Queues a save; `finish` does the rest of it and raises nothing."""
        with self._changed:
            self._submitted += 1
            self._open.append(save)
            self._queue.append((save, finish))
            if not self._watches_exit:
                self._watches_exit = True
                _before_exit(self._drain)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hyper-ckpt-saves", daemon=True)
                self._thread.start()

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
                if not self._queue:
                    self._thread = None
                    return
                save, finish = self._queue.popleft()
            finish()
            with self._changed:
                number = self._submitted - len(self._open) + 1
                self._open.remove(save)
                self._ended.append((number, save))
                self._changed.notify_all()

    def _drain(self) -> None:
        """At the end of the interpreter: waits for what is in flight, as long as its own timeout, and reports."""
        while (first := self._first()) is not None:
            if not self._has_ended(first):
                _say(f"the save to {first.checkpoint_id} was not over when the process ended: it is not published")
                return
        error = self.failure()
        if error is not None:
            _say(f"a save in the background failed and nobody asked for its result: {type(error).__name__}: {error}")

    def _first(self) -> Background | None:
        with self._changed:
            return self._open[0] if self._open else None

    def _has_ended(self, save: Background) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: save not in self._open, save.timeout)


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"hyper_ckpt: {text}", file=sys.stderr, flush=True)


def _before_exit(action: Callable[[], None]) -> None:
    """Before, not after, the interpreter refuses to start threads: writing needs some."""
    register = getattr(threading, "_register_atexit", atexit.register)
    register(action)
