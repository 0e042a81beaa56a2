"""Making a checkpoint visible, and removing what it replaced."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from dataclasses import dataclass

import msgspec

from hyper_ckpt.contracts.store import ByteStore, Expect
from hyper_ckpt.engine.save import discard
from hyper_ckpt.errors import CheckpointError, CheckpointExistsError, CorruptCheckpointError
from hyper_ckpt.manifest import MANIFEST_NAME, Manifest
from hyper_ckpt.receipt import Receipt, receipt_name

_OWN_FILE = re.compile(
    r"(?:receipts/)?rank-\d{5,}-([0-9a-f]{16})(?:-\d{4,})?\.(?:safetensors|json)(?:\.tmp-[0-9a-f]+)?"
)


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
    """
    info = store.stat(MANIFEST_NAME)
    if info is None:
        return Previous(None, (), None)
    if not overwrite:
        raise CheckpointExistsError(
            f"{store.url} holds a complete checkpoint: save to another path, or pass overwrite=True to replace it"
        )
    try:
        manifest = Manifest(store.read(MANIFEST_NAME))
    except CorruptCheckpointError:
        # What a damaged manifest lists cannot be told; its files stay as leftovers.
        return Previous(info.etag, (), None)
    return Previous(info.etag, listed_files(manifest), manifest.save_id)


def listed_files(manifest: Manifest) -> tuple[str, ...]:
    """Every object that belongs to a checkpoint, but for the manifest itself."""
    receipts = [receipt_name(r, manifest.save_id) for r in range(manifest.world_size)]
    return (*(f.name for f in manifest.files), *receipts)


def publish(store: ByteStore, manifest: bytes, previous: Previous, *, durable: bool) -> None:
    """The commit point. Then removes what the replaced manifest listed, and nothing else.

    Raises:
        CheckpointReplacedError: another saver published here meanwhile.
    """
    expect = Expect.ABSENT if previous.etag is None else previous.etag
    store.publish(MANIFEST_NAME, manifest, expect, sync=durable)
    discard(store, previous.names)


def remove_leftovers(store: ByteStore, previous: Previous, age: float) -> list[str]:
    """Removes files of saves that died: no manifest has their id, receipts are missing, older than `age` seconds.

    Returns:
        The names removed.
    """
    by_id: dict[str, list[str]] = defaultdict(list)
    for name in store.list():
        match = _OWN_FILE.fullmatch(name)
        if match and match[1] != previous.save_id:
            by_id[match[1]].append(name)
    removed = []
    for save_id, names in by_id.items():
        try:
            newest = max((info.modified for n in names if (info := store.stat(n)) is not None), default=0.0)
            complete = _has_all_receipts(store, save_id, names)
        except CheckpointError:
            continue
        if time.time() - newest > age and not complete:
            discard(store, names)
            removed += names
    return removed


def _has_all_receipts(store: ByteStore, save_id: str, names: list[str]) -> bool:
    """Whether every rank of a save left its receipt: then it may be a checkpoint without a manifest."""
    receipts = [n for n in names if n.startswith("receipts/") and n.endswith(".json")]
    if not receipts:
        return False
    try:
        world_size = msgspec.json.decode(store.read(receipts[0]), type=Receipt).world_size
    except msgspec.DecodeError:
        return False
    return (
        {receipt_name(r, save_id) for r in range(world_size)} <= set(receipts) if world_size == len(receipts) else False
    )
