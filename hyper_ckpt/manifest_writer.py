"""What was saved, as the bytes of a manifest: the inverse of `Manifest`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hyper_ckpt.box import IntArray
from hyper_ckpt.columns import Columns, Placed
from hyper_ckpt.manifest import FORMAT, VERSION, Document, Grid, Part, TensorRow
from hyper_ckpt.receipt import ZERO_DIGEST, FileRecord, seal


@dataclass(frozen=True)
class ManifestContent:
    """What `encode_manifest` needs beside the chunks. `state` and `user` are JSON bytes."""

    save_id: str
    world_size: int
    created: float
    library: str
    files: Sequence[FileRecord]
    receipts: Sequence[str]
    state: bytes
    user: bytes
    order: Sequence[str]
    ties: Mapping[str, str]


def encode_manifest(content: ManifestContent, columns: Columns, placed: Placed) -> bytes:
    """The bytes of a manifest.

    Args:
        content: everything else; `files` may hold more files than `placed`; `order` gives the order of names.
            `ties` maps names to those whose bytes they are.
        columns: all chunks, in canonical order (tensor, copy, offsets).
        placed: where they lie, chunk i in entry i.
    """
    number_of = {f.name: i for i, f in enumerate(content.files)}
    numbers = tuple([number_of[name] for name in placed.files])
    known = placed.memo.get("rows")
    if known is None or known[0] != numbers:
        known = placed.memo["rows"] = (numbers, *_rows(columns, placed, numbers))
    _, rows, file_lists, grids = known
    document = Document(
        FORMAT, VERSION, ZERO_DIGEST, content.save_id, content.world_size, content.created, content.library,
        list(content.files), list(content.receipts), file_lists, grids,
        {name: rows[content.ties.get(name, name)] for name in content.order},
        msgspec.Raw(content.state), msgspec.Raw(content.user),
    )  # fmt: skip
    return seal(msgspec.json.encode(document))[0]


def _rows(
    columns: Columns, placed: Placed, numbers: Sequence[int]
) -> tuple[dict[str, msgspec.Raw], list[list[int]], list[msgspec.Raw]]:
    """The encoded tensors by name, the lists of files and the grids. `numbers` are those of the files of `placed`."""
    table, writer = columns.table, _GridWriter()
    file = np.array(numbers or [0], np.int64)[placed.entry_file[placed.entry]]
    start = chunk_starts(columns, placed)
    key = np.stack([columns.tensor, columns.copy], axis=1)
    firsts = np.flatnonzero(np.r_[True, (np.diff(key, axis=0) != 0).any(axis=1)]) if len(key) else np.zeros(0, np.int64)
    single = (np.diff(np.r_[firsts, len(key)]) == 1) & (
        columns.sizes[firsts] == table.padded_shapes()[columns.tensor[firsts]]
    ).all(axis=1)
    parts: dict[int, list[Part]] = {}
    bounds = zip(firsts.tolist(), np.r_[firsts, len(key)][1:].tolist(), single.tolist(), strict=True)
    tensors, files, starts = columns.tensor.tolist(), file.tolist(), start.tolist()
    for low, high, whole in bounds:
        number = tensors[low]
        shape = table.shapes[number]
        if whole:
            part = Part(writer.grid_of_one(len(shape), files[low]), starts[low])
        else:
            d = len(shape)
            part = writer.part(
                shape, columns.offsets[low:high, :d], columns.sizes[low:high, :d], file[low:high], start[low:high]
            )
        parts.setdefault(number, []).append(part)
    nothing, rows = [Part()], {}
    for number, name in enumerate(table.names):
        first, *copies = parts.get(number, nothing)
        row = TensorRow(
            first.grid,
            first.start,
            first.offsets,
            first.sizes,
            first.files,
            dtype=table.dtypes[number],
            shape=table.shapes[number],
            copies=copies,
        )
        rows[name] = msgspec.Raw(msgspec.json.encode(row))
    return rows, writer.file_lists, writer.grids


def chunk_starts(columns: Columns, placed: Placed) -> IntArray:
    """Bytes from the data section to each chunk, which must be one run inside its entry."""
    entry = placed.entry
    inner = columns.offsets - placed.entry_offsets[entry]
    strides = np.ones_like(columns.sizes)
    strides[:, :-1] = np.cumprod(placed.entry_sizes[entry][:, :0:-1], axis=1)[:, ::-1]
    return np.asarray(
        placed.entry_start[entry] + (inner * strides).sum(axis=1) * columns.table.itemsizes()[columns.tensor]
    )


class _GridWriter:
    """Finds the grids that chunks form, and numbers distinct grids and lists of files."""

    def __init__(self) -> None:
        self._lists: dict[bytes, int] = {}
        self._numbers: dict[tuple[bytes, ...], int] = {}
        self._ones: dict[tuple[int, int], int] = {}
        self.file_lists: list[list[int]] = []
        self.grids: list[msgspec.Raw] = []

    def grid_of_one(self, ndim: int, file: int) -> int:
        """The grid of tensors that are stored in one piece."""
        if (ndim, file) not in self._ones:
            self._ones[ndim, file] = self._add_grid([[0]] * ndim, np.array([file], np.int64))
        return self._ones[ndim, file]

    def part(self, shape: tuple[int, ...], offsets: IntArray, sizes: IntArray, file: IntArray, start: IntArray) -> Part:
        """The chunks of one copy, in row-major order of their offsets."""
        starts: int | list[int] = int(start[0]) if (start == start[0]).all() else start.tolist()
        key = (np.array(shape, np.int64).tobytes(), offsets.tobytes(), sizes.tobytes(), file.tobytes())
        if key not in self._numbers:
            cuts = _grid_cuts(shape, offsets, sizes)
            self._numbers[key] = -1 if cuts is None else self._add_grid(cuts, file)
        if self._numbers[key] < 0:
            return Part(None, starts, offsets.tolist(), sizes.tolist(), file.tolist())
        return Part(self._numbers[key], starts)

    def _add_grid(self, cuts: list[list[int]], file: IntArray) -> int:
        number = self._lists.setdefault(file.tobytes(), len(self.file_lists))
        if number == len(self.file_lists):
            self.file_lists.append(file.tolist())
        self.grids.append(msgspec.Raw(msgspec.json.encode(Grid(cuts, number))))
        return len(self.grids) - 1


def _grid_cuts(shape: tuple[int, ...], offsets: IntArray, sizes: IntArray) -> list[list[int]] | None:
    """Where the cells begin in each dimension, if the boxes are the cells of a grid over the whole shape."""
    cuts = [np.unique(offsets[:, d]) for d in range(len(shape))]
    if math.prod([len(c) for c in cuts]) != len(offsets):
        return None
    for d, c in enumerate(cuts):
        ends = np.append(c[1:], shape[d])
        if c[0] != 0 or not np.array_equal(offsets[:, d] + sizes[:, d], ends[np.searchsorted(c, offsets[:, d])]):
            return None
    return [c.tolist() for c in cuts]
