"""Making a checkpoint visible, and removing what it replaced."""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hyper_ckpt.contracts.store import ByteStore, Expect
from hyper_ckpt.engine.save import discard
from hyper_ckpt.engine.visible import FIRST_PAUSE, LAST_PAUSE
from hyper_ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingFileError,
    StoreError,
)
from hyper_ckpt.manifest import MANIFEST_NAME, Manifest
from hyper_ckpt.receipt import receipt_name
from hyper_ckpt.storage.alone import find_alone
from hyper_ckpt.storage.names import is_temporary
from hyper_ckpt.storage.whole import read_record

logger = logging.getLogger("hyper_ckpt")

_OWN_FILE = re.compile(
    r"(?:receipts/)?rank-\d{5,}-([0-9a-f]{16})(?:-[A-Za-z0-9._-]+)?\.(?:safetensors|json)(?:\.tmp-[0-9a-f]+)?"
)
_ID = re.compile("[0-9a-f]{16}")
_SAVE_ID = re.compile(rb'"save_id":"([0-9a-f]{16})"')
_TEMPORARY_MANIFEST = re.compile(re.escape(MANIFEST_NAME) + r"\.tmp-[0-9a-f]+")


@dataclass(frozen=True)
class Previous:
    """What lay at the path when a save began: the manifest's etag, and the files that it lists."""

    etag: str | None
    names: tuple[str, ...]
    save_id: str | None


def look(store: ByteStore, overwrite: bool) -> Previous:
    """What is at the path now.

    Raises:
        CheckpointExistsError: a checkpoint, and `overwrite` is False.
        UnreadableFileError: what has a manifest's or receipt's name is no file, or cannot be read.
    """
    info = store.stat(MANIFEST_NAME)
    alone, problem = _alone(store) if info is None else (None, "")
    if info is None and alone is None and not problem:
        return Previous(None, (), None)
    if not overwrite:
        what = f"what may become a checkpoint, or was one: {problem}" if problem else "a checkpoint already"
        raise CheckpointExistsError(
            f"{store.url} holds {what}. Save to another path, or pass overwrite=True to replace it"
        )
    if problem:
        return Previous(None, (), None)
    if info is None:
        assert alone is not None
        return Previous(None, listed_files(alone), alone.save_id)
    try:
        manifest = Manifest(read_record(store, MANIFEST_NAME))
    except CorruptCheckpointError:
        # What a damaged manifest lists cannot be told; its files stay as leftovers.
        return Previous(info.etag, (), None)
    return Previous(info.etag, listed_files(manifest), manifest.save_id)


def _alone(store: ByteStore) -> tuple[Manifest | None, str]:
    """The checkpoint at a path without a manifest, if it needs none; else what is wrong with what lies there, if
    anything of that kind does."""
    try:
        return find_alone(store), ""
    except (CheckpointNotFoundError, CorruptCheckpointError) as error:
        return None, str(error)


def refuse_occupied(store: ByteStore, save_id: str, rank: int) -> None:
    """Ranks that do not talk save to a path that holds nothing but this very save.

    Raises:
        CheckpointExistsError: it holds a checkpoint, files of another save, or this rank's part already.
    """
    if store.stat(MANIFEST_NAME) is not None:
        raise CheckpointExistsError(f"{store.url} holds a checkpoint already: save to another path")
    for name in store.list():
        match = _OWN_FILE.fullmatch(name)
        if match and match[1] != save_id:
            raise CheckpointExistsError(
                f"{store.url} holds files of another save ({name}): save to another path, or remove them. "
                "Ranks that do not talk cannot tell whether it is still running"
            )
        if name == receipt_name(rank, save_id) or name.startswith(f"rank-{rank:05d}-{save_id}"):
            raise CheckpointExistsError(
                f"{store.url} holds rank {rank}'s part of this save already: give every attempt a save_token of its own"
            )


def listed_files(manifest: Manifest) -> tuple[str, ...]:
    """Every object that belongs to a checkpoint, but for the manifest itself."""
    receipts = [receipt_name(r, manifest.save_id) for r in range(manifest.world_size)]
    files = [f.name for f in manifest.files]
    # Names of the save carry its id. A hostile manifest must not have anything else deleted.
    return tuple(n for n in (*files, *receipts) if manifest.save_id in n) if _ID.fullmatch(manifest.save_id) else ()


def publish(
    store: ByteStore, manifest: bytes, previous: Previous, save_id: str, *, durable: bool, seconds: float = 0.0
) -> None:
    """The commit point. Then, once the new manifest is seen, removes what the replaced one listed, and nothing else.

    Args:
        seconds: how long to look for the new manifest, at least once.

    Raises:
        CheckpointReplacedError: another saver published here meanwhile.
        StoreError: it failed; `is_published` tells whether before or after the commit point.
    """
    expect = Expect.ABSENT if previous.etag is None else previous.etag
    try:
        store.publish(MANIFEST_NAME, manifest, expect, sync=durable)
    except StoreError as error:
        if is_published(store, save_id):
            # A power failure may still bring the old manifest back: what that lists stays.
            raise StoreError(
                f"{store.url} holds the new checkpoint, whole, but it may not survive a power failure: {error} "
                "Save again once the cause is mended"
            ) from error
        raise
    found = _found_after(store, previous, seconds)
    if found is None and previous.etag is None and not previous.names:
        # Nothing was replaced, so nothing is lost: e.g. retention of another manager of the run removed this step.
        logger.warning("%s/%s was published, and another program has removed it since", store.url, MANIFEST_NAME)
        return
    if found is None or found == previous.save_id:
        raise StoreError(
            f"{store.url}/{MANIFEST_NAME} was published, but is not there: another program removed it, or put the old "
            "one back. Find out which; save again"
        )
    if found:  # this save's, or of one that has replaced it since and removes only this save's files
        discard(store, previous.names)


def _found_after(store: ByteStore, previous: Previous, seconds: float) -> str | None:
    """As `published_id`, looked at until it is no longer what was replaced; "" where the store cannot tell."""
    until, pause = time.monotonic() + seconds, FIRST_PAUSE
    while True:
        try:
            found = published_id(store)
        except CheckpointError:
            return ""
        if found not in (None, previous.save_id) or time.monotonic() >= until:
            return found
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)


def published_id(store: ByteStore) -> str | None:
    """The save id of the manifest that lies at the path now, "" if it names none; None if there is no manifest.

    Raises:
        StoreError: the store cannot tell.
    """
    try:
        info = store.stat(MANIFEST_NAME)
        if info is None:
            store.read_into(MANIFEST_NAME, [], [])  # to open a file has a network client ask its server
            info = store.stat(MANIFEST_NAME)
        head = bytearray(0 if info is None else min(info.size, 256))
        store.read_into(MANIFEST_NAME, [(0, len(head))], [memoryview(head)])
    except MissingFileError:
        return None
    match = _SAVE_ID.search(head)
    return match[1].decode() if match else ""


def is_published(store: ByteStore, save_id: str) -> bool:
    """Whether the manifest that lies at the path now is this save's. A store that cannot tell counts as yes."""
    try:
        return published_id(store) == save_id
    except Exception:  # nothing may be removed that may be in use
        return True


def discard_failed(store: ByteStore, names: Sequence[str], save_id: str) -> None:
    """Removes what a rank wrote for a save that failed, unless it was published all the same."""
    if not is_published(store, save_id):
        discard(store, names)


def remove_leftovers(store: ByteStore, previous: Previous, age: float) -> list[str]:
    """Removes what saves that died left behind: files of an id that no manifest has, and temporary ones.

    Only what is older than `age` seconds goes: another save may be at work. Where the manifest cannot be
    read, whole sets stay.

    Returns:
        The names removed.
    """
    by_id: dict[str, list[str]] = defaultdict(list)
    for name in store.list():
        match = _OWN_FILE.fullmatch(name)
        if match is None and not _TEMPORARY_MANIFEST.fullmatch(name):
            continue
        save_id = match[1] if match else name
        if save_id != previous.save_id or is_temporary(name):
            by_id[save_id].append(name)
    removed = []
    for names in by_id.values():
        try:
            newest = max((info.modified for n in names if (info := store.stat(n)) is not None), default=0.0)
            if time.time() - newest <= age or _is_needed(store, names, previous):
                continue
        except CheckpointError:
            continue
        discard(store, names)
        removed += names
    return removed


class _Alone(msgspec.Struct, frozen=True):
    """What tells a receipt that makes a checkpoint without a manifest from one that is only part of a save."""

    world_size: int
    description: msgspec.Raw | None = None


def _is_needed(store: ByteStore, names: list[str], previous: Previous) -> bool:
    """Whether these files may be a checkpoint: the unreadable manifest's, or one that needs no manifest."""
    receipts = [n for n in names if n.startswith("receipts/") and n.endswith(".json")]
    if not receipts:
        return False
    try:
        receipt = msgspec.json.decode(read_record(store, receipts[0]), type=_Alone)
    except msgspec.MsgspecError:
        return False
    unreadable = previous.etag is not None and previous.save_id is None
    return receipt.world_size == len(receipts) and (unreadable or receipt.description is not None)
