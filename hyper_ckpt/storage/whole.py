"""Objects that are read into memory at once: manifests, receipts, notes, indexes. Their size is checked first."""

from __future__ import annotations

from hyper_ckpt.contracts.store import ByteStore, ObjectInfo
from hyper_ckpt.errors import ManifestError
from hyper_ckpt.receipt import MAX_RECORD_BYTES, RECORD_HEAD

_LARGE = 1 << 20
"""Bytes from which on it pays to look how a record begins before the rest of it is read."""


def read_whole(store: ByteStore, name: str, limit: int = MAX_RECORD_BYTES) -> bytes:
    """A small object.

    Args:
        limit: bytes that no object of this kind exceeds.

    Raises:
        MissingFileError: there is no such object.
        ManifestError: it is larger than that.
    """
    _check_size(store, name, limit)
    return store.read(name)


def read_record(store: ByteStore, name: str) -> bytes:
    """A manifest or a receipt; its content is not checked.

    Raises:
        MissingFileError: there is no such object.
        ManifestError: it is larger than any, or is large and does not begin like one.
    """
    info = _check_size(store, name, MAX_RECORD_BYTES)
    if info is not None and info.size > _LARGE and not begins_like_record(store, name):
        raise ManifestError(
            f"{store.url}/{name} does not begin like a record of this library: it is damaged, or something else"
        )
    return store.read(name)


def begins_like_record(store: ByteStore, name: str) -> bool:
    """Whether an object begins like those of this library do: many programs have a `manifest.json`.

    Raises:
        MissingFileError: there is no such object.
    """
    info = store.stat(name)
    if info is not None and info.size < len(RECORD_HEAD):
        return False
    head = bytearray(len(RECORD_HEAD))
    store.read_into(name, [(0, len(head))], [memoryview(head)])
    return head == RECORD_HEAD


def _check_size(store: ByteStore, name: str, limit: int) -> ObjectInfo | None:
    info = store.stat(name)
    if info is not None and info.size > limit:
        raise ManifestError(
            f"{store.url}/{name} has {info.size:,} bytes, more than any such file ({limit:,}): it is damaged, or "
            "something else. Load an earlier checkpoint"
        )
    return info
