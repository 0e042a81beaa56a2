"""An observer that logs how a save or load ended, and how far a long one is where no terminal shows it."""

from __future__ import annotations

import logging
import time

from hyper_ckpt.builtin.progress_bar import interval_seconds, on_terminal
from hyper_ckpt.contracts.events import Event
from hyper_ckpt.text import clean, size

logger = logging.getLogger("hyper_ckpt")
logger.addHandler(logging.NullHandler())

_DOING = {"save": "saving", "load": "loading"}
_DONE = {"save": "saved", "load": "loaded"}


class LogLines:
    """One line at the end and one per interval before, on rank 0; a failure is logged on every rank."""

    def __init__(self) -> None:
        self._next = time.monotonic() + interval_seconds()

    def __call__(self, event: Event) -> None:
        where = clean(event.checkpoint_id)
        if event.kind == "failed":
            error = event.error
            logger.error(
                "%s %s failed after %.1f s on rank %d: %s: %s",
                _DOING[event.call], where, event.seconds, event.rank, type(error).__name__, clean(str(error)),
            )  # fmt: skip
        elif event.rank != 0:
            return
        elif event.kind == "progress" and not event.quiet and interval_seconds() and not on_terminal():
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + interval_seconds()
                logger.info("%s %s: %s", _DOING[event.call], where, how_far(event))
        elif event.kind in ("durable", "published", "loaded"):
            # Of a load, and of a save without collectives, rank 0 knows its own share only.
            whole = event.call == "save" and event.checkpoint_bytes > 0
            nbytes = event.checkpoint_bytes if whole else event.bytes_done
            ranks = "1 rank" if event.world_size == 1 else f"{event.world_size} ranks"
            share = ranks if whole else "rank 0"
            logger.info(
                "%s %s: %s in %.2f s, %.3g GB/s (%s)",
                _DONE[event.call], where, size(nbytes), event.seconds,
                nbytes / 1e9 / max(event.seconds, 1e-9), share,
            )  # fmt: skip


def how_far(event: Event) -> str:
    """Percent, bytes and speed of this rank's share."""
    percent = 100 * event.bytes_done // max(event.bytes_total, 1)
    speed = event.bytes_done / 1e9 / max(event.seconds, 1e-9)
    return f"{percent} %, {size(event.bytes_done)} of {size(event.bytes_total)}, {speed:.2f} GB/s"
