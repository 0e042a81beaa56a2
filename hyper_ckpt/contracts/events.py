"""What observers of saves and loads are told. Knows nothing of how they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["start", "agreed", "staged", "progress", "durable", "published", "loaded", "failed"]


@dataclass(frozen=True)
class Event:
    """A moment of a save or load on this rank.

    Args:
        kind: "start"; "agreed" (all ranks are there, the plan is made); "progress" (at most five a second);
            "staged" (the state may be changed again); then one of "durable", "published" (a save with
            durable=False), "loaded" and "failed".
        call: which call it is.
        checkpoint_id: path or URL, as the store names it.
        platform: its name.
        rank, world_size: of this process.
        bytes_done: bytes of this rank's share that were written, or read or received.
        bytes_total: bytes of this rank's share; 0 before "agreed".
        checkpoint_bytes: bytes of all ranks' data, on rank 0, at the end; else 0.
        seconds: since the start.
        quiet: the caller asked for no progress to be shown.
        error: why it failed.
    """

    kind: EventKind
    call: Literal["save", "load"]
    checkpoint_id: str
    platform: str
    rank: int
    world_size: int
    bytes_done: int
    bytes_total: int
    checkpoint_bytes: int
    seconds: float
    quiet: bool
    error: BaseException | None = None


Observer = Callable[[Event], None]
"""Called in the thread in which the event happens, of "progress" any: it must be quick, and must not call back into
the library. What it raises is reported as a warning, and it hears no more of this call."""


@dataclass(frozen=True)
class EventSpec:
    """How a plugin announces an observer.

    Args:
        name: for warnings.
        load: the observer of one save or load, asked for at its start: a new one each time, or always the same.
    """

    name: str
    load: Callable[[], Observer]
