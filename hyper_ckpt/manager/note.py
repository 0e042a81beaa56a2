"""What a run notes beside a checkpoint: metrics, and whether it is pinned. It goes along when the folder is copied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from hyper_ckpt.contracts.store import ByteStore, Expect
from hyper_ckpt.errors import ManifestError, MissingFileError, UnreadableFileError
from hyper_ckpt.storage.whole import read_whole
from hyper_ckpt.strict_json import refuse_duplicates

NOTE_NAME = "hyper-ckpt-step.json"
MAX_NOTE_BYTES = 16 << 20


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """The note of one checkpoint.

    Args:
        metrics: by name; None where the value was no finite number.
        pinned: no retention removes it.
    """

    format: str = "hyper-ckpt-step"
    version: int = 1
    metrics: dict[str, float | None] = {}
    pinned: bool = False


def metrics_of(values: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Metrics as they are noted.

    Args:
        values: numbers, or what `float` takes, by name.

    Raises:
        ValueError: one is no number; names it.
    """
    out: dict[str, float | None] = {}
    for name, value in (values or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"metrics are numbers, but {name!r} is a {type(value).__name__}: pass a float") from error
        out[str(name)] = number if math.isfinite(number) else None
    return out


def read_note(store: ByteStore, prefix: str) -> Note | None:
    """The note of the checkpoint below `prefix`, None if it has none. One that is damaged, or cannot be read, counts as
    a pin: nothing may be removed because of that."""
    try:
        data = read_whole(store, prefix + NOTE_NAME, MAX_NOTE_BYTES)
    except MissingFileError:
        return None
    except (ManifestError, UnreadableFileError):
        return Note(pinned=True)
    try:
        note = msgspec.json.decode(data, type=Note)
        refuse_duplicates(data, msgspec.json.encode(note))
        return note
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Note(pinned=True)


def write_note(store: ByteStore, prefix: str, note: Note, durable: bool) -> None:
    """Puts a note in place, atomically.

    Raises:
        ValueError: it has more metrics than are read again.
    """
    data = msgspec.json.encode(note)
    if len(data) > MAX_NOTE_BYTES:
        raise ValueError(
            f"{len(note.metrics):,} metrics are too many for the note of a checkpoint: note those to choose by"
        )
    store.publish(prefix + NOTE_NAME, data, Expect.ANY, sync=durable)
