"""Tells observers how a save or load is getting on."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal

from hyper_ckpt.contracts.events import Event, EventKind, EventSpec, Observer
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.system_errors import system_errors

_INTERVAL_SECONDS = 0.2


class Reporter:
    """One save or load on this rank, as its observers see it. Begins with `start`; what may fail is done in `failing`.

    Args:
        call: which call it is.
        checkpoint_id: as the store names it.
        platform: whose ranks call.
        quiet: the caller asked for no progress to be shown.
        specs: the observers.
    """

    def __init__(
        self,
        call: Literal["save", "load"],
        checkpoint_id: str,
        platform: Platform,
        quiet: bool,
        specs: Sequence[EventSpec],
    ) -> None:
        self._call: Literal["save", "load"] = call
        self._checkpoint_id, self._platform, self._quiet = checkpoint_id, platform, quiet
        self._specs = specs
        self._observers: list[tuple[str, Observer]] = []
        self._lock = threading.Lock()
        self._begin = self._last = time.monotonic()
        self._done = self._total = 0
        self._is_staged = False

    def start(self) -> Reporter:
        """The call begins."""
        for spec in self._specs:
            try:
                self._observers.append((spec.name, spec.load()))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whoever only watches must not stop a save
                _complain(spec.name, error)
        self._tell("start")
        return self

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What is raised inside is told as "failed"; what the system refuses is a StoreError."""
        try:
            with system_errors(f"the {self._call} of {self._checkpoint_id}"):
                yield
        except BaseException as error:
            self._tell("failed", error=error)
            raise

    def agreed(self, total: int) -> None:
        """All ranks are there, and this one has `total` bytes to move."""
        self._done, self._total = 0, total
        self._tell("agreed")

    def progress(self, nbytes: int) -> None:
        """So many more bytes were moved; from any thread."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            due = now - self._last >= _INTERVAL_SECONDS
            if due:
                self._last = now
        if due:
            self._tell("progress")

    def staged(self) -> None:
        """The state may be changed again; told once."""
        if not self._is_staged:
            self._is_staged = True
            self._tell("staged")

    def finished(self, kind: EventKind, checkpoint_bytes: int) -> None:
        """The call has done what it should."""
        self._tell(kind, checkpoint_bytes)

    def _tell(self, kind: EventKind, checkpoint_bytes: int = 0, error: BaseException | None = None) -> None:
        if not self._observers:
            return
        ranks, seconds = self._platform.ranks, time.monotonic() - self._begin
        event = Event(
            kind, self._call, self._checkpoint_id, self._platform.name, ranks.rank, ranks.world_size,
            self._done, self._total, checkpoint_bytes, seconds, self._quiet, error,
        )  # fmt: skip
        for name, observer in self._observers.copy():
            try:
                observer(event)
            except KeyboardInterrupt:
                raise
            except BaseException as failure:  # whoever only watches must not stop a save, nor end the process
                self._observers = [each for each in self._observers if each[1] is not observer]
                _complain(name, failure)


def _complain(name: str, error: BaseException) -> None:
    with contextlib.suppress(Exception):  # warnings may be errors here, and the error stream closed
        warnings.warn(f"the observer {name!r} failed and hears no more of this call: {error!r}", stacklevel=4)
