"""What rank 0 does for a run: notes and pins, and removing what is superseded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import msgspec

from hyper_ckpt.errors import CheckpointError, CheckpointNotFoundError, SaveInFlightError
from hyper_ckpt.manager.note import NOTE_NAME, Note
from hyper_ckpt.manager.removal import clean
from hyper_ckpt.manager.retention import Retention
from hyper_ckpt.manager.run import Run


class Keeper:
    """Changes what lies under a root; one thread at a time.

    Args:
        run: what lies there.
        retention: which checkpoints stay.
        leftover_age: seconds; None: leftovers stay.
        busy: the steps that are being saved.
    """

    def __init__(
        self, run: Run, retention: Retention, leftover_age: float | None, busy: Callable[[], set[int]]
    ) -> None:
        self._run, self._retention, self._leftover_age, self._busy = run, retention, leftover_age, busy
        self._lock = threading.Lock()
        self._problems: list[str] = []
        self._unmeasured = self._told = False

    def note(self, step: int, note: Note, durable: bool) -> None:
        """Notes what is known of a step that is about to be saved. A pin that is there stays."""
        folder = self._run.folder(step)
        with self._lock:
            self._run.check()
            self._run.refuse_link(folder)
            old = self._run.note(folder)
            if old is not None or note != Note():
                pinned = note.pinned or (old is not None and old.pinned)
                self._run.write_note(folder, msgspec.structs.replace(note, pinned=pinned), durable)

    def forget(self, step: int) -> None:
        """Removes the note of a step whose save failed, unless something else of a checkpoint lies there. Never
        raises."""
        folder = self._run.folder(step)
        with self._lock, contextlib.suppress(CheckpointError):
            names = set(self._run.store.list(f"{folder}/"))
            if names <= {f"{folder}/{NOTE_NAME}"}:
                self._run.store.delete(f"{folder}/{NOTE_NAME}")

    def set_pin(self, step: int, pinned: bool) -> None:
        """See `CheckpointManager.pin`."""
        with self._lock:
            folder = self._run.folder(step) if step in self._busy() else self._run.existing(step)
            note = self._run.note(folder) or Note()
            if note.pinned != pinned:
                self._run.write_note(folder, msgspec.structs.replace(note, pinned=pinned), durable=True)

    def delete(self, step: int) -> None:
        """See `CheckpointManager.delete`."""
        with self._lock:
            if step in self._busy():
                raise SaveInFlightError(f"step {step} is being saved: wait for its handle, then delete it")
            folder = self._run.existing(step)
            note = self._run.note(folder)
            if note is not None and note.pinned:
                raise CheckpointError(f"step {step} of {self._run.store.url} is pinned: unpin({step}) first")
            self._run.remove(folder)

    def tidy(self, step: int) -> None:
        """Once `step` is complete: removes what no rule keeps. Never raises: `problems` has what went wrong."""
        with self._lock:
            busy = {step, *self._busy()}
            try:
                superseded: list[str] = []
                if not self._retention.keeps_all:
                    superseded, self._unmeasured = self._run.superseded(self._retention, busy)
                for folder in superseded:
                    self._remove(folder)
                if self._leftover_age is not None:
                    age, self._leftover_age = self._leftover_age, None
                    self._problems += clean(self._run.store, age, skip={self._run.folder(s) for s in busy})[1]
            except CheckpointError as error:
                self._problems.append(str(error))
            except Exception as error:  # the checkpoint is complete: no bug in here may end a training
                self._problems.append(f"{type(error).__name__}: {error}")

    def _remove(self, folder: str) -> None:
        """One that cannot be removed does not keep the others."""
        try:
            self._run.remove(folder)
        except CheckpointNotFoundError:  # another manager was quicker
            pass
        except CheckpointError as error:
            self._problems.append(str(error))

    def unmeasured(self) -> bool:
        """Whether superseded ones stay since no checkpoint has the metric to choose by. Says so once."""
        found, self._told = self._unmeasured and not self._told, self._told or self._unmeasured
        return found

    def problems(self) -> list[str]:
        """What could not be removed since the last call."""
        found, self._problems = self._problems, []
        return found
