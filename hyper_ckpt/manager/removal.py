"""Removing checkpoints, and what saves that died left behind. Nothing else is ever touched."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hyper_ckpt.contracts.store import ByteStore, Expect, ObjectInfo, Sink
from hyper_ckpt.engine.commit import listed_files, look, remove_leftovers
from hyper_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingFileError,
    StoreError,
    VersionError,
)
from hyper_ckpt.manager.listing import folder_modified, folders, is_left_empty, is_link, is_part
from hyper_ckpt.manager.note import NOTE_NAME
from hyper_ckpt.manifest import MANIFEST_NAME, Manifest
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.names import is_name, is_temporary
from hyper_ckpt.storage.whole import begins_like_record, read_record


def remove_checkpoint(url: str) -> int:
    """Removes what this library wrote at a path: the manifest first, so that from then on nothing there is complete.

    What lies behind a link stays, whether that is the path itself or something below it.

    Returns:
        How many objects were removed.

    Raises:
        CheckpointNotFoundError: there is nothing of this library.
        StoreError: something could not be removed, since it lies behind a link for example; unless that is the
            manifest, the rest is no checkpoint any more.
    """
    store = registry().store(url)
    if isinstance(store, LocalStore):
        # From above it: below the root of a store no link is followed.
        above, name = os.path.split(store.url)
        return remove_below(registry().store(above), name)
    return remove_below(store, "")


def remove_below(root: ByteStore, folder: str) -> int:
    """As `remove_checkpoint`, in a folder below the root of a store; "" is the root."""
    store = _view(root, folder)
    if folder and is_link(root, folder):
        raise StoreError(
            f"{store.url} is a symbolic link, and nothing is removed through one: remove the link itself, or name the "
            "checkpoint that it leads to"
        )
    manifest, listed = _manifest_at(store)
    names = store.list()
    own = [n for n in names if n in listed or is_own(n)]
    if not manifest and not own:
        raise CheckpointNotFoundError(f"no checkpoint at {store.url}: nothing there was written by this library")
    if manifest:
        store.delete(MANIFEST_NAME)
        store.sync()  # a power failure must not bring it back when files are gone
    for name in sorted(own, key=lambda n: not n.startswith("receipts/")):
        store.delete(name)
    remove_empty(registry().store(store.url))
    return len(own) + manifest


def is_own(name: str) -> bool:
    """Whether this library wrote the object of this name, unless it is a manifest: many programs have one."""
    if is_temporary(name):
        stem = name[: name.rindex(".tmp-")]
        return stem in (MANIFEST_NAME, NOTE_NAME) or is_part(stem)
    return name == NOTE_NAME or is_part(name)


def _manifest_at(store: ByteStore) -> tuple[bool, Collection[str]]:
    """Whether there is a manifest of this library, and the names that it lists."""
    try:
        return True, set(listed_files(Manifest(read_record(store, MANIFEST_NAME))))
    except MissingFileError:
        return False, ()
    except CorruptCheckpointError:
        return begins_like_record(store, MANIFEST_NAME) or any(map(is_part, store.list())), ()
    except VersionError:
        return True, ()


def remove_empty(store: ByteStore) -> None:
    """Removes the directory of a checkpoint, if there is one and nothing is in it."""
    if isinstance(store, LocalStore):
        with contextlib.suppress(OSError):
            os.rmdir(store.url)


@dataclass(frozen=True)
class Leftover:
    """An object that a dead save left: name below the root, and bytes."""

    name: str
    nbytes: int


def clean(
    root: ByteStore, age: float, *, dry_run: bool = False, skip: Collection[str] = ()
) -> tuple[list[Leftover], list[str]]:
    """Removes leftovers of dead saves at the root of a store and one level below, where no link leads.

    Args:
        age: seconds; what is younger may still be being written, and stays.
        dry_run: only say what would go.
        skip: folders to leave as they are.

    Returns:
        What went, and what could not be removed, as messages.
    """
    gone: list[Leftover] = []
    problems: list[str] = []
    for folder, names in sorted(folders(root).items()):
        if folder in skip or is_link(root, folder):
            continue
        if is_left_empty(folder, names) and not names - {"receipts"}:
            gone += _remove_left_empty(root, folder, age, dry_run)
            continue
        if not any(is_own(n) or is_temporary(n) for n in names):
            continue
        view = _view(root, folder, dry_run)
        try:
            remove_leftovers(view, look(view, overwrite=True), age)
            _remove_notes(view, names, age)
        except CheckpointError as error:
            problems.append(str(error))
        gone += [Leftover(f"{folder}/{n}" if folder else n, size) for n, size in view.removed]
        problems += view.problems
        if view.removed and not dry_run and folder:
            remove_empty(registry().store(view.url))
    return gone, problems


def _remove_left_empty(root: ByteStore, folder: str, age: float, dry_run: bool) -> list[Leftover]:
    """Removes the directory of a step in which nothing lies, if it is old enough."""
    path = f"{root.url.rstrip('/')}/{folder}"
    if time.time() - folder_modified(path) <= age:
        return []
    if not dry_run:
        registry().store(path).remove_folders(1)
    return [Leftover(folder, 0)]


def _remove_notes(view: _Removing, names: Collection[str], age: float) -> None:
    """Notes that were never put in place, and one that belongs to nothing any more."""
    left = set(names) - {name for name, _ in view.removed}
    own = [n for n in left if is_temporary(n) and n.startswith(f"{NOTE_NAME}.")]
    if NOTE_NAME in left and MANIFEST_NAME not in left and not any(map(is_part, left)):
        own.append(NOTE_NAME)
    for name in own:
        info = view.stat(name)
        if info is not None and time.time() - info.modified > age:
            with contextlib.suppress(CheckpointError):  # noted in `problems`
                view.delete(name)


def _view(root: ByteStore, folder: str, dry_run: bool = False) -> _Removing:
    """A folder below the root of a store, "" for the root, to remove from. It is seen from the root, so that it can
    become a link at any time and nothing is removed through that."""
    if not folder or is_name(folder):
        return _Removing(root, folder, dry_run)
    return _Removing(registry().store(os.path.join(root.url, folder)), "", dry_run)


class _Removing(ByteStore):
    """A folder of a store that notes what is removed from it, and with `dry_run` only that."""

    def __init__(self, inner: ByteStore, folder: str, dry_run: bool) -> None:
        self._inner, self._prefix, self._dry_run = inner, f"{folder}/" if folder else "", dry_run
        self.url = f"{inner.url.rstrip('/')}/{folder}" if folder else inner.url
        self.removed: list[tuple[str, int]] = []
        self.problems: list[str] = []

    def delete(self, name: str) -> None:
        try:
            info = self.stat(name)
            if info is None:
                return
            if not self._dry_run:
                self._inner.delete(self._prefix + name)
        except CheckpointError as error:
            self.problems.append(str(error))
            raise
        self.removed.append((name, info.size))

    def list(self, prefix: str = "") -> list[str]:
        return [name[len(self._prefix) :] for name in self._inner.list(self._prefix + prefix)]

    def stat(self, name: str) -> ObjectInfo | None:
        return self._inner.stat(self._prefix + name)

    def sync(self) -> None:
        self._inner.sync()

    def read(self, name: str) -> bytes:
        return self._inner.read(self._prefix + name)

    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        self._inner.read_into(self._prefix + name, ranges, buffers)

    def create(self, name: str, size: int) -> Sink:
        raise StoreError(f"{self.url}: only to remove from")

    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        raise StoreError(f"{self.url}: only to remove from")
