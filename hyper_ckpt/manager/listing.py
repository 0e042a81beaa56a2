"""Which checkpoints lie in a directory."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace

from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.engine.commit import listed_files
from hyper_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    MissingFileError,
    UnreadableFileError,
    VersionError,
)
from hyper_ckpt.manager.note import NOTE_NAME, Note, read_note
from hyper_ckpt.manifest import MANIFEST_NAME, Manifest
from hyper_ckpt.storage.alone import find_alone
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.names import is_temporary
from hyper_ckpt.storage.syscalls import store_error
from hyper_ckpt.storage.whole import begins_like_record, read_record

_PART = re.compile(r"rank-\d{5,}-[0-9a-f]{16}(-[A-Za-z0-9._-]+)?\.safetensors|receipts/rank-\d{5,}-[0-9a-f]{16}\.json")


STEP_FOLDER = re.compile(r"step-([0-9]{1,18})")
"""How a run names the folder of a step."""


@dataclass(frozen=True)
class Entry:
    """A checkpoint of a directory. What an unfinished or unreadable one does not say is None.

    Args:
        name: of the directory; "." is the listed one itself.
        state: complete, incomplete (files of a save without a manifest), damaged, unreadable (no permission, an I/O
            error, or no regular file), or newer (than this release).
        created: seconds since the epoch; of an incomplete one, when it was last written to.
        nbytes: of its data files; of an unfinished one, of all that is there.
        problem: what is wrong, if it is not complete.
        pinned: a run keeps it, whatever its retention says.
        metrics: what was noted of it; None where a value was no finite number.
    """

    name: str
    path: str
    state: str
    created: float
    nbytes: int
    world_size: int | None = None
    tensors: int | None = None
    save_id: str | None = None
    format_version: int | None = None
    problem: str | None = None
    pinned: bool = False
    metrics: dict[str, float | None] = field(default_factory=dict)


def is_part(name: str) -> bool:
    """Whether a save wrote the object of this name, unless it is a manifest."""
    return _PART.fullmatch(name) is not None


def checkpoints(store: ByteStore) -> list[Entry]:
    """The checkpoints at the root of a store and one level below: newest last, those whose names differ
    only in numbers together and in the order of these."""
    found = [entry for name, names in folders(store).items() if (entry := entry_of(store, name, names)) is not None]
    newest: dict[str, float] = defaultdict(float)
    for entry in found:
        newest[_stem(entry)] = max(newest[_stem(entry)], entry.created)
    return sorted(found, key=lambda e: (newest[_stem(e)], _stem(e), natural(e.name)))


def entry_at(store: ByteStore) -> Entry:
    """The checkpoint at the root of a store.

    Raises:
        CheckpointNotFoundError: nothing of this library is there.
    """
    names = _local_names(store.url) if isinstance(store, LocalStore) else set(store.list())
    entry = entry_of(store, "", names)
    if entry is None:
        raise CheckpointNotFoundError(f"no checkpoint at {store.url}: nothing there was written by this library")
    return entry


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts step-9 before step-10."""
    parts = re.split(r"([0-9]+)", text)
    return [(int(p), "") if i % 2 else (0, p) for i, p in enumerate(parts)]


def _stem(entry: Entry) -> str:
    return re.sub("[0-9]+", "#", entry.name)


def folders(store: ByteStore) -> dict[str, set[str]]:
    """Names of objects by the folder below the root ("" is the root), as seen from that folder."""
    found: dict[str, set[str]] = defaultdict(set)
    if isinstance(store, LocalStore):
        # Not `store.list`: it walks all that lies below, however much that is.
        for folder in ("", *_subfolders(store.url)):
            found[folder] = _local_names(os.path.join(store.url, folder))
        return found
    for name in store.list():
        folder, _, rest = name.partition("/")
        found[""].add(name)
        if rest:
            found[folder].add(rest)
    return found


def _subfolders(path: str) -> list[str]:
    try:
        with os.scandir(path) as found:
            return [each.name for each in found if _is_folder(each)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store_error("listing", path, error) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Links that lead nowhere count: what is read below them says what is wrong."""
    try:
        return entry.is_dir()
    except OSError:
        return True


def is_link(store: ByteStore, folder: str) -> bool:
    """Whether a folder below the root is a symbolic link: what is there may belong to others."""
    return isinstance(store, LocalStore) and store.is_link(folder)


def _local_names(path: str) -> set[str]:
    """Files in a directory and in its receipts/. One that cannot be listed may have a manifest: to read it says."""
    try:
        names = _file_names(path)
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError:
        return {MANIFEST_NAME}
    receipts: list[str] = []
    with contextlib.suppress(OSError):
        receipts = _file_names(os.path.join(path, "receipts"))
    return {*names, *(f"receipts/{name}" for name in receipts)}


def _file_names(path: str) -> list[str]:
    """Files and links. What should be one of the first two and is neither is to be seen as well."""
    with os.scandir(path) as found:
        return [
            each.name
            for each in found
            if each.name in (MANIFEST_NAME, NOTE_NAME) or each.is_file(follow_symlinks=False) or each.is_symlink()
        ]


def entry_of(store: ByteStore, folder: str, names: set[str]) -> Entry | None:
    """What a folder holds; None if that is no checkpoint, not even part of one.

    Args:
        folder: below the root of `store`; "" is the root.
        names: of its objects, as seen from it.
    """
    entry = _entry(store, folder, names)
    if entry is None or NOTE_NAME not in names:
        return entry
    note = read_note(store, f"{folder}/" if folder else "") or Note()
    return replace(entry, pinned=note.pinned, metrics=note.metrics)


def _entry(store: ByteStore, folder: str, names: set[str]) -> Entry | None:
    prefix = f"{folder}/" if folder else ""
    parts = sorted(filter(is_part, names))
    empty = Entry(folder or ".", f"{store.url.rstrip('/')}/{folder}".rstrip("/"), "incomplete", 0.0, 0)
    if MANIFEST_NAME in names:
        try:
            if not parts and not begins_like_record(store, prefix + MANIFEST_NAME):
                return None
            return _complete(store, prefix, names, Manifest(read_record(store, prefix + MANIFEST_NAME)), empty)
        except MissingFileError:
            pass  # removed meanwhile, or never there
        except CheckpointError as error:
            return replace(_with_totals(store, prefix, parts, empty), state=_state_of(error), problem=str(error))
    if not parts:
        return _unfinished(store, folder, names, empty)
    try:
        alone = find_alone(store, prefix)
        if alone is not None:
            return _complete(store, prefix, names, alone, empty)
    except CheckpointNotFoundError as error:
        return replace(_with_totals(store, prefix, parts, empty), problem=str(error))
    except CheckpointError as error:
        return replace(_with_totals(store, prefix, parts, empty), state=_state_of(error), problem=str(error))
    problem = f"there is no {MANIFEST_NAME}: the save did not finish, or is still running"
    return replace(_with_totals(store, prefix, parts, empty), problem=problem)


def _unfinished(store: ByteStore, folder: str, names: set[str], empty: Entry) -> Entry | None:
    """What a save that failed or died early left: a step's folder that is empty, or has nothing but a note or
    temporaries. None for other folders."""
    if not is_left_empty(folder, names):
        return None
    problem = "nothing was saved here: the save failed or was killed early, or is still running"
    found = _with_totals(store, "", sorted(f"{folder}/{n}" for n in names), empty)
    return replace(found, created=found.created or folder_modified(empty.path), problem=problem)


def is_left_empty(folder: str, names: set[str]) -> bool:
    """Whether a folder below a root is as saves leave it that wrote nothing of a checkpoint."""
    only_own = all(name in (NOTE_NAME, "receipts") or is_temporary(name) for name in names)
    return only_own and bool(STEP_FOLDER.fullmatch(folder))


def folder_modified(path: str) -> float:
    """When something was last made or removed in a directory, in seconds since the epoch; 0 where there is none."""
    try:
        return os.stat(path, follow_symlinks=False).st_mtime
    except (OSError, ValueError):
        return 0.0


def _state_of(error: CheckpointError) -> str:
    if isinstance(error, VersionError):
        return "newer"
    return "unreadable" if isinstance(error, UnreadableFileError) else "damaged"


def _complete(store: ByteStore, prefix: str, names: set[str], manifest: Manifest, empty: Entry) -> Entry:
    absent = [n for n in listed_files(manifest) if n not in names and store.stat(prefix + n) is None]
    if (
        absent
        and MANIFEST_NAME in names
        and (again := Manifest(read_record(store, prefix + MANIFEST_NAME))).save_id != manifest.save_id
    ):
        return _complete(store, prefix, names, again, empty)  # it was replaced meanwhile
    resized = [f.name for f in manifest.files if (i := store.stat(prefix + f.name)) is not None and i.size != f.size]
    problem = None
    for what, found in (("missing", absent), ("of another size", resized)):
        if found:
            others = f" and {len(found) - 1} more" if len(found) > 1 else ""
            problem = f"{what}: {found[0]}{others}"
            break
    return replace(
        empty,
        state="complete" if problem is None else "damaged",
        created=manifest.created,
        nbytes=sum(f.size for f in manifest.files),
        world_size=manifest.world_size,
        tensors=len(manifest.tensors),
        save_id=manifest.save_id,
        format_version=manifest.version,
        problem=problem,
    )


def _with_totals(store: ByteStore, prefix: str, parts: list[str], empty: Entry) -> Entry:
    """Size and time of what there is; what goes away meanwhile, or cannot be looked at, does not count."""
    created, nbytes = 0.0, 0
    for name in (*parts, MANIFEST_NAME):
        with contextlib.suppress(CheckpointError):
            info = store.stat(prefix + name)
            if info is not None:
                created = max(created, info.modified)
                nbytes += info.size if name != MANIFEST_NAME else 0
    return replace(empty, created=created, nbytes=nbytes)
