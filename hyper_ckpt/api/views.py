"""Metadata, in the field's words, of a manifest or of what one rank saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hyper_ckpt.api.common import state_of
from hyper_ckpt.box import element_counts
from hyper_ckpt.cells import Chunks, ListedCells
from hyper_ckpt.columns import Columns, Placed
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.errors import ManifestError
from hyper_ckpt.manifest import VERSION, Manifest, StoredTensor
from hyper_ckpt.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LazyMapping,
    Metadata,
    MetadataIndex,
    StorageInfo,
    TensorProperties,
    TensorStorageMetadata,
)
from hyper_ckpt.receipt import FileRecord
from hyper_ckpt.state import Node, decode_tree, rebuild, variants_of
from hyper_ckpt.state.walk import values_by_kind


def user_value(data: bytes) -> Any:
    """What `save(user_metadata=...)` was given.

    Raises:
        ManifestError: it is not what that writes.
    """

    def none(*_: Any) -> Any:
        raise ManifestError("the user metadata holds what is no plain value: load an earlier checkpoint")

    try:
        return rebuild(decode_tree(data), tensor=none, payload=none, blob=none, make_tensor=none)["user"]
    except (KeyError, TypeError, IndexError) as error:
        raise ManifestError("the user metadata is damaged: load an earlier checkpoint") from error


def metadata_of(manifest: Manifest, tree: Node = None) -> Metadata:
    """All that a manifest says; tensors are decoded when asked for. `tree` is its state, where that is known."""
    tree = state_of(manifest) if tree is None else tree
    values = {name: BytesStorageMetadata(kind) for name, kind in values_by_kind(tree).items()}

    def describe(name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        return values[name] if name in values else _tensor(manifest.tensor(name))

    def storage(name: str) -> tuple[tuple[MetadataIndex, StorageInfo], ...]:
        return _storage(manifest.tensor(name), manifest.files)

    return Metadata(
        LazyMapping({**manifest.tensors, **values}, describe),
        tree,
        LazyMapping(manifest.tensors, storage),
        manifest.version,
        manifest.save_id,
        manifest.world_size,
        manifest.created,
        {f.name: f.size for f in manifest.files},
        user_value(manifest.user),
        variants_of(tree),
    )


def own_metadata(
    columns: Columns,
    placed: Placed,
    files: list[FileRecord],
    tree: Node,
    facts: tuple[str, int, float, Any],
    ties: Mapping[str, str],
) -> Metadata:
    """What one rank saved, in the same words.

    Args:
        facts: save id, world size, time, user metadata.
        ties: names that are stored as another one.
    """
    table = columns.table
    number_of = {name: i for i, name in enumerate(table.names)}
    number_of |= {name: number_of[first] for name, first in ties.items()}

    def stored(name: str) -> StoredTensor:
        number = number_of[name]
        rows = np.flatnonzero(columns.tensor == number)
        d = len(table.shapes[number])
        entry = placed.entry[rows]
        boxes = ListedCells(columns.offsets[rows, :d], columns.sizes[rows, :d], placed.entry_file[entry])
        chunks = Chunks(boxes, placed.entry_start[entry])
        return StoredTensor(name, table.dtypes[number], table.shapes[number], (chunks,))

    values = {name: BytesStorageMetadata(kind) for name, kind in values_by_kind(tree).items()}

    def describe(name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        return values[name] if name in values else _tensor(stored(name))

    return Metadata(
        LazyMapping({**number_of, **values}, describe),
        tree,
        LazyMapping(number_of, lambda name: _storage(stored(name), files)),
        VERSION,
        *facts[:3],
        {f.name: f.size for f in files},
        facts[3],
        variants_of(tree),
    )


def _tensor(stored: StoredTensor) -> TensorStorageMetadata:
    chunks = stored.copies[0]
    boxes = zip(chunks.offsets.tolist(), chunks.sizes.tolist(), strict=True)
    return TensorStorageMetadata(
        TensorProperties(stored.dtype), stored.shape, tuple(ChunkStorageMetadata(tuple(o), tuple(s)) for o, s in boxes)
    )


def _storage(stored: StoredTensor, files: Any) -> tuple[tuple[MetadataIndex, StorageInfo], ...]:
    out = []
    itemsize = dtype_of(stored.dtype).itemsize
    for copy, chunks in enumerate(stored.copies):
        counts = element_counts(chunks.sizes)
        columns = (chunks.offsets.tolist(), chunks.file.tolist(), chunks.start.tolist(), counts.tolist())
        for i, (offsets, number, start, count) in enumerate(zip(*columns, strict=True)):
            where = StorageInfo(files[number].name, files[number].data_start + start, count * itemsize, copy)
            out.append((MetadataIndex(stored.name, tuple(offsets), i), where))
    return tuple(out)
