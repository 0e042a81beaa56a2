"""One safetensors file per rank: where chunks go, and where they are found."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import xxhash

from hyper_ckpt.box import IntArray, element_counts, intersect, pad, uncovered
from hyper_ckpt.cells import GridCells
from hyper_ckpt.columns import Columns, Located, Placed
from hyper_ckpt.contracts.placement import FilePlan, StorageReader, StorageWriter
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.errors import (
    CheckpointNotFoundError,
    CoverageError,
    ManifestError,
    MissingFileError,
    PlanError,
    StoreError,
)
from hyper_ckpt.manifest import MANIFEST_NAME, Manifest, StoredTensor
from hyper_ckpt.storage.alone import find_alone
from hyper_ckpt.storage.safetensors_file import MAX_HEADER_BYTES, Entry, build_header, choose_keys, header_upper_bound
from hyper_ckpt.storage.whole import read_record

_MOST_REMEMBERED = 1 << 20
"""Chunks whose places, headers and rows are kept for the next save: some 100 bytes each."""


def data_file_name(rank: int, save_id: str, part: int, group: str = "") -> str:
    """The name of a rank's data file; a rank has several parts only where a header would grow too long."""
    return f"rank-{rank:05d}-{save_id}{f'-{group}' if group else ''}{f'-{part:04d}' if part else ''}.safetensors"


class FileSystemWriter(StorageWriter):
    """Places each rank's chunks in a safetensors file of its own. To have several, override `group_of`.

    Args:
        path: path or URL of the checkpoint; None: `save(checkpoint_id=...)` says it.
        single_file_per_rank: False: each rank has a file for each tensor of which it stores a part, and one for all
            other values.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, single_file_per_rank: bool = True) -> None:
        self.checkpoint_id = None if path is None else os.fspath(path)
        self._single = bool(single_file_per_rank)

    def at(self, checkpoint_id: str | os.PathLike[str]) -> FileSystemWriter:
        other = copy.copy(self)
        other.checkpoint_id = os.fspath(checkpoint_id)
        return other

    def identity(self) -> str:
        return f"{type(self).__name__}{'' if self._single else '(single_file_per_rank=False)'}"

    def group_of(self, name: str) -> str:
        """Which of its rank's files a tensor, or a stored value, goes to: what has the same group shares a file.

        Args:
            name: of the leaf, as in `{"model": {"w": ...}}` "model/w".

        Returns:
            "", or what stands in the file's name: a letter, then letters, digits, "." and "_".
        """
        return ""

    def place(self, columns: Columns, save_id: str) -> Placed:
        labels = self._labels(columns)
        known = columns.memo.get("placed")
        if known is None or known[0] != labels:
            known = (labels, *self._placed(columns, labels))
            if len(columns) <= _MOST_REMEMBERED:
                columns.memo["placed"] = known
        placed: Placed
        _, placed, parts = known
        return placed.named(tuple([data_file_name(rank, save_id, part, label) for rank, part, label in parts]))

    def _placed(self, columns: Columns, labels: Sequence[str]) -> tuple[Placed, list[tuple[int, int, str]]]:
        """Places without names of files, and rank, part and label of each file."""
        itemsizes = columns.table.itemsizes()[columns.tensor]
        nbytes = element_counts(columns.sizes) * itemsizes
        groups, number = np.unique(np.array(labels, object), return_inverse=True)
        # One slot a rank and group; a slot has several files only where a header would grow too long.
        slot = columns.rank * max(len(groups), 1) + number.astype(np.int64)[columns.tensor]
        order = np.lexsort((np.arange(len(columns)), _uneven(columns), -itemsizes, slot))
        part = self._parts(columns, order, slot[order])
        key = slot[order] * (int(part.max(initial=0)) + 1) + part
        new = np.r_[True, np.diff(key) != 0] if len(key) else np.zeros(0, bool)
        file_of, firsts = np.cumsum(new) - 1, np.flatnonzero(new)
        ends = np.cumsum(nbytes[order])
        starts = ends - nbytes[order]
        starts -= starts[firsts][file_of] if len(firsts) else 0
        entry = np.empty(len(columns), np.int64)
        entry[order] = np.arange(len(columns))
        tensor, ranks = columns.tensor[order], columns.rank[order][firsts]
        parts = [
            (rank, number, labels[t])
            for rank, number, t in zip(ranks.tolist(), part[firsts].tolist(), tensor[firsts].tolist(), strict=True)
        ]
        placed = Placed((), ranks, entry, tensor, file_of, starts, columns.offsets[order], columns.sizes[order])
        return placed, parts

    def _labels(self, columns: Columns) -> list[str]:
        """The group of each tensor of the table."""
        if self._single and getattr(self.group_of, "__func__", None) is FileSystemWriter.group_of:
            return [""] * len(columns.table.names)
        return [self._tensor_label(name) for name in columns.table.names]

    def _tensor_label(self, name: str) -> str:
        """The group of a tensor; where each has a file of its own, one that tells it from all others."""
        group = self._label(name)
        if self._single:
            return group
        readable = re.sub("[^A-Za-z0-9._]", "_", name)[-80:]
        return f"{group or 'tensor'}.{readable}.{xxhash.xxh3_64_hexdigest(name.encode('utf-8', 'surrogatepass'))}"

    def _label(self, name: str) -> str:
        group = self.group_of(name)
        if group and not re.fullmatch("[A-Za-z][A-Za-z0-9._]*", group):
            raise PlanError(
                f"{type(self).__name__}.group_of({name!r}) is {group!r}, which cannot stand in the name of a file: "
                'begin with a letter and use only letters, digits, "." and "_"'
            )
        return group

    def _parts(self, columns: Columns, order: IntArray, slot: IntArray) -> IntArray:
        """Which of its slot's files each chunk goes to, in placement order."""
        bounds = np.array(
            [header_upper_bound(n, len(s)) for n, s in zip(columns.table.names, columns.table.shapes, strict=True)]
            or [0]
        )
        header = np.cumsum(bounds[columns.tensor[order]])
        firsts = np.flatnonzero(np.r_[True, np.diff(slot) != 0]) if len(slot) else np.zeros(0, np.int64)
        before = np.r_[0, header][firsts]
        return np.asarray(
            (header - before[np.searchsorted(firsts, np.arange(len(slot)), side="right") - 1])
            // (MAX_HEADER_BYTES // 2)
        )

    def files(
        self, columns: Columns, placed: Placed, rank: int, save_id: str, payloads: Sequence[tuple[str, int]]
    ) -> list[FilePlan]:
        beside: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for name, nbytes in payloads:
            beside[self._label(name)].append((name, nbytes))
        mine = np.flatnonzero(placed.file_rank == rank).tolist()
        firsts = np.searchsorted(placed.entry_file, mine)  # entries are in the order of files
        group = [self._tensor_label(columns.table.names[t]) for t in placed.entry_tensor[firsts].tolist()]
        # A group's payloads are in the last of its files.
        last = dict(zip(group, mine, strict=True))
        plans = [
            self._file(columns, placed, f, beside.pop(g, ()) if last[g] == f else ())
            for f, g in zip(mine, group, strict=True)
        ]
        return plans + [_plan(data_file_name(rank, save_id, 0, g), [], own) for g, own in beside.items()]

    def _file(self, columns: Columns, placed: Placed, file: int, payloads: Sequence[tuple[str, int]]) -> FilePlan:
        # One for each file: payloads may have other sizes in every save.
        known = placed.memo.get(("file", file))
        if known is None or known[0] != payloads:
            known = placed.memo["file", file] = (payloads, self._planned(columns, placed, file, payloads))
        plan: FilePlan = known[1]
        return dataclasses.replace(plan, name=placed.files[file])

    def _planned(self, columns: Columns, placed: Placed, file: int, payloads: Sequence[tuple[str, int]]) -> FilePlan:
        table = columns.table
        rows = np.flatnonzero(placed.entry_file == file)
        tensors = placed.entry_tensor[rows].tolist()
        names = [table.names[t] for t in tensors]
        keys = choose_keys(names + [n for n, _ in payloads])
        places = zip(
            placed.entry_offsets[rows].tolist(),
            placed.entry_sizes[rows].tolist(),
            placed.entry_start[rows].tolist(),
            strict=True,
        )
        entries = []
        for key, t, name, (offsets, sizes, start) in zip(keys[: len(rows)], tensors, names, places, strict=True):
            shape = table.shapes[t]
            d = len(shape)
            entries.append(Entry(key, table.dtype(t), tuple(sizes[:d]), start, name, shape, tuple(offsets[:d])))
        return _plan("", entries, payloads, keys[len(rows) :])


def _plan(name: str, entries: list[Entry], payloads: Sequence[tuple[str, int]], keys: Sequence[str] = ()) -> FilePlan:
    """Appends the payloads as U8 entries."""
    at = sum(entry.nbytes for entry in entries)
    starts = {}
    for key, (payload, nbytes) in zip(keys or choose_keys([n for n, _ in payloads]), payloads, strict=True):
        entries.append(Entry(key, dtype_of("uint8"), (nbytes,), at, payload, (nbytes,), (0,)))
        starts[payload] = at
        at += nbytes
    return FilePlan(name, build_header(entries), at, starts)


def _uneven(columns: Columns) -> IntArray:
    """0 for chunks of tensors whose chunks all have one size, so that the starts of later ones stay equal over files.

    Known only where all chunks are: it must not change what a rank sees of itself, so it looks at
    the chunk's own tensor: a chunk is even if it divides its tensor.
    """
    shapes = columns.table.padded_shapes()[columns.tensor]
    return np.asarray((shapes % np.maximum(columns.sizes, 1) != 0).any(axis=1), np.int64)


class FileSystemReader(StorageReader):
    """Finds chunks of a checkpoint of this library.

    Args:
        path: path or URL of the checkpoint; None: `load(checkpoint_id=...)` says it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.checkpoint_id = None if path is None else os.fspath(path)

    def at(self, checkpoint_id: str | os.PathLike[str]) -> FileSystemReader:
        other = copy.copy(self)
        other.checkpoint_id = os.fspath(checkpoint_id)
        return other

    def identity(self) -> str:
        return type(self).__name__

    def load_metadata(self, store: ByteStore) -> Manifest:
        return self._load(store, partial=False)

    def load_partial(self, store: ByteStore) -> Manifest:
        return self._load(store, partial=True)

    def _load(self, store: ByteStore, *, partial: bool) -> Manifest:
        try:
            data = read_record(store, MANIFEST_NAME)
        except StoreError as error:
            if isinstance(error.__cause__, NotADirectoryError):
                raise CheckpointNotFoundError(
                    f"no checkpoint at {store.url}: it is a file; give the directory that holds {MANIFEST_NAME}"
                ) from error
            raise
        except MissingFileError:
            alone = find_alone(store, partial=partial)
            if alone is not None:
                _check_names(alone)
                return alone
            raise CheckpointNotFoundError(f"no checkpoint at {store.url}: {_what_is_there(store)}") from None
        manifest = Manifest(data, f"{store.url}/{MANIFEST_NAME}")
        _check_names(manifest)
        if manifest.absent:
            raise ManifestError(f"{manifest.what} is not a valid manifest: it has no digest of a receipt")
        return manifest

    def locate(self, manifest: Manifest, wanted: Columns, rank: int) -> Located:
        numbers, first = np.unique(wanted.tensor, return_index=True)  # sorted: the rows of one tensor lie together
        bounds = [*first.tolist(), len(wanted)]
        names = [wanted.table.names[number] for number in numbers.tolist()]
        file, start = np.full(len(wanted.table.names), -1), np.zeros(len(wanted.table.names), np.int64)
        file[numbers], start[numbers] = manifest.pieces(names)
        parts = [
            self._locate(manifest, manifest.tensor(names[i]), wanted, np.arange(bounds[i], bounds[i + 1]), rank)
            for i in np.flatnonzero(file[numbers] < 0).tolist()
        ]
        parts.append(_of_one_piece(wanted, file, start))
        columns = [np.concatenate(c) for c in zip(*parts, strict=True)]
        return Located(tuple(f.name for f in manifest.files), *columns)

    def _locate(
        self, manifest: Manifest, stored: StoredTensor, wanted: Columns, rows: IntArray, rank: int
    ) -> tuple[IntArray, ...]:
        d = len(stored.shape)
        offsets, sizes = wanted.offsets[rows, :d], wanted.sizes[rows, :d]
        own = [c for c in stored.copies[1:] if len(c) and manifest.files[int(c.file[0])].rank == rank]
        for chunks in (*own, *stored.copies):
            want, chunk = chunks.cells.touching(offsets, sizes)
            piece = chunks.cells.boxes(chunk)
            low, part, _ = intersect(offsets[want], sizes[want], *piece)
            found = np.bincount(want, element_counts(part), len(rows))
            whole = (found == element_counts(sizes)).all()
            if whole and (isinstance(chunks.cells, GridCells) or not _overlap(want, low - offsets[want], part, sizes)):
                boxes = zip((*piece, low, part), (0, 1, 0, 1), strict=True)
                padded = [pad(box, wanted.table.width, fill) for box, fill in boxes]
                return (rows[want], chunks.file[chunk], chunks.starts_of(chunk), *padded)
        raise not_whole(manifest, stored.name)


def _of_one_piece(wanted: Columns, file: IntArray, start: IntArray) -> tuple[IntArray, ...]:
    """Any part of a tensor that is stored in one piece lies in that; all such tensors at once.

    Args:
        file, start: per tensor, -1 for the others.
    """
    rows = np.flatnonzero(file[wanted.tensor] >= 0) if len(wanted) else np.zeros(0, np.int64)
    tensor = wanted.tensor[rows]
    whole = wanted.table.padded_shapes()[tensor] if len(rows) else np.zeros((0, wanted.table.width), np.int64)
    return rows, file[tensor], start[tensor], np.zeros_like(whole), whole, wanted.offsets[rows], wanted.sizes[rows]


def _what_is_there(store: ByteStore) -> str:
    """Why a place without a manifest is no checkpoint, and what to do."""
    names = store.list()
    if not names:
        return "nothing is there: give the directory that holds manifest.json"
    if any(name.startswith("rank-") for name in names):
        return f"there is no {MANIFEST_NAME}; what is there belongs to a save that did not finish"
    folders = [name.partition("/")[0] for name in names if name.count("/") == 1 and name.endswith(f"/{MANIFEST_NAME}")]
    if folders:
        latest = max(folders, key=lambda folder: (len(folder), folder))  # of step-9 and step-10 the later
        return (
            f"it holds checkpoints, such as {latest}: give one of them (see `hyper-ckpt ls`), or use CheckpointManager"
        )
    if any(name.endswith(".safetensors") for name in names):
        return "these are plain safetensors files: load them with storage_reader=PlainSafetensorsReader()"
    if ".metadata" in names:
        return "it was written by torch.distributed.checkpoint: load it with that, and save it anew"
    return f"there is no {MANIFEST_NAME}: give the directory that holds one"


def _check_names(manifest: Manifest) -> None:
    """Data files are a checkpoint's own: neither its records nor anything that is under another save's id."""
    if not re.fullmatch("[0-9a-f]{16}", manifest.save_id):
        raise ManifestError(f"{manifest.what} is not a valid manifest: {manifest.save_id!r} is no save id")
    if not manifest.receipts:
        raise ManifestError(f"{manifest.what} is not a valid manifest: it lists no receipts")
    for file in manifest.files:
        if manifest.save_id not in file.name or file.name.startswith("receipts/"):
            raise ManifestError(f"{manifest.what} is not a valid manifest: {file.name!r} is no data file of this save")


def not_whole(manifest: Manifest, name: str) -> CoverageError:
    """The error for a tensor that, or a part of which, is not stored exactly once."""
    return CoverageError(f"{manifest.checkpoint}: {name!r} is not stored whole: load an earlier checkpoint")


def is_whole(stored: StoredTensor) -> bool:
    """Whether the first copy of a tensor covers it exactly once."""
    return stored.copies[0].cells.is_whole(stored.shape)


def _overlap(want: IntArray, offsets: IntArray, sizes: IntArray, wanted: IntArray) -> bool:
    """Whether parts of one wanted box overlap, given that they have as many elements as it has."""
    if len(want) == len(wanted) or not wanted.shape[1]:
        return False
    return bool(len(uncovered(want, offsets, sizes, wanted)))
