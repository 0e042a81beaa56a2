"""An observer that draws a bar for a long save or load, on rank 0 and on a terminal only."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from hyper_ckpt.contracts.events import Event
from hyper_ckpt.text import clean

PROGRESS_VARIABLE = "HYPER_CKPT_PROGRESS"
"""Seconds between two log lines where there is no terminal (10 if not set); 0 shows no progress anywhere."""

_SHORT_SECONDS = 1.0


def interval_seconds() -> float:
    """What `PROGRESS_VARIABLE` says."""
    try:
        return max(float(os.environ.get(PROGRESS_VARIABLE, "10")), 0.0)
    except ValueError:
        return 10.0


def on_terminal() -> bool:
    """Whether the error stream is one."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


class ProgressBar:
    """Appears when a call has taken a second, and leaves nothing behind. It shows rank 0's share: shares are level."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress: Any = None
        self._task: Any = None
        self._over = False

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.kind in ("durable", "published", "loaded", "failed"):
                self._over = True
                if self._progress is not None:
                    self._progress.stop()
            elif event.kind == "progress" and not self._over and self._is_wanted(event):
                if self._progress is None:
                    self._start(event)
                self._progress.update(self._task, completed=event.bytes_done, total=event.bytes_total)

    def _is_wanted(self, event: Event) -> bool:
        shown = event.rank == 0 and not event.quiet and event.seconds >= _SHORT_SECONDS
        return shown and interval_seconds() > 0 and on_terminal()

    def _start(self, event: Event) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        name = clean(event.checkpoint_id.rstrip("/").rpartition("/")[2])
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            DownloadColumn(binary_units=True),
            Speed(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("saving " + name if event.call == "save" else "loading " + name)
        self._progress.start()
