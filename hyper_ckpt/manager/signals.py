"""SIGTERM, for all managers of this process: one handler, which calls what was installed before it."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any


class Sigterm:
    """Tells whoever listens that the process is to end. It then goes on: to save and end is the listener's part.

    The handler is installed for the first listener, and what was there before it is put back after the last. Methods
    are held weakly: an object that nobody has any more does not listen.
    """

    def __init__(self) -> None:
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._previous: Any = signal.SIG_DFL
        self._entered = False

    def listen(self, tell: Callable[[], None]) -> bool:
        """Calls `tell` at every SIGTERM, between two instructions of the main thread.

        Returns:
            False where no handler can be installed: outside the main thread, or above one that is not Python's.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        installed = signal.getsignal(signal.SIGTERM)
        if installed is None:
            return False
        if not self._alive() and installed != self._handle:
            self._previous = installed
            signal.signal(signal.SIGTERM, self._handle)
        self._listeners = [*self._alive(), weakref.WeakMethod(tell)]
        return True

    def forget(self, tell: Callable[[], None]) -> None:
        """Takes a listener back; one that is not there is fine."""
        left = [each for each in self._alive() if each() != tell]
        if len(left) < len(self._listeners):
            self._listeners = left
            if not left:
                self._uninstall()

    def _alive(self) -> list[weakref.WeakMethod[Callable[[], None]]]:
        return [each for each in self._listeners if each() is not None]

    def _uninstall(self) -> None:
        """If another handler was installed above this one, this one stays below it and only passes on."""
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._entered:  # what was installed above this handler before is now below it, too
            return
        self._entered = True
        try:
            listeners = self._alive()
            for each in listeners:
                tell = each()
                if tell is not None:
                    tell()
            if callable(self._previous):
                self._previous(number, frame)
            elif self._previous == signal.SIG_DFL and not listeners:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        finally:
            self._entered = False


SIGTERM = Sigterm()
