"""Plans as columns: numpy arrays, never an object per chunk."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_ckpt.box import IntArray, element_counts
from hyper_ckpt.dtypes import DType, dtype_of


@dataclass(frozen=True)
class TensorTable:
    """The tensors that columns number: names sorted, dtypes and global shapes beside them."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[str, str, tuple[int, ...]]]) -> TensorTable:
        """The table of rows of name, dtype and global shape, in their order."""
        return cls(tuple(name for name, _, _ in rows), tuple(d for _, d, _ in rows), tuple(s for _, _, s in rows))

    def dtype(self, number: int) -> DType:
        """The dtype row of a tensor."""
        return dtype_of(self.dtypes[number])

    @functools.cached_property
    def width(self) -> int:
        """D of every column of boxes: the largest number of dimensions, at least 1."""
        return max((len(s) for s in self.shapes), default=1) or 1

    def itemsizes(self) -> IntArray:
        """Bytes of an element, per tensor."""
        return self._itemsizes

    @functools.cached_property
    def _itemsizes(self) -> IntArray:
        return np.array([dtype_of(d).itemsize for d in self.dtypes], np.int64)

    def ndims(self) -> IntArray:
        """Dimensions, per tensor."""
        return self._ndims

    @functools.cached_property
    def _ndims(self) -> IntArray:
        return np.array([len(shape) for shape in self.shapes], np.int64)

    def padded_shapes(self) -> IntArray:
        """(tensors, D) shapes padded with 1."""
        return self._padded_shapes

    @functools.cached_property
    def _padded_shapes(self) -> IntArray:
        out = np.ones((len(self.shapes), self.width), np.int64)
        for i, shape in enumerate(self.shapes):
            out[i, : len(shape)] = shape
        return out


@dataclass(frozen=True)
class Columns:
    """Boxes of tensors and the rank that writes (or reads) each: row i is one chunk, never empty.

    Args:
        table: the tensors.
        tensor: (n,) number in the table.
        rank: (n,) who writes, or reads, it.
        offsets: (n, D) padded with 0.
        sizes: (n, D) padded with 1.
        copy: (n,) 0 for the chunks that cover each tensor once, higher for further copies.
        group: (n,) for a load, number in `groups` of the ranks that want the chunk; -1: the reader only.
        groups: sorted rank sets.
        memo: what was worked out of these columns, so that it is not worked out again. Copies have one of their own.
    """

    table: TensorTable
    tensor: IntArray
    rank: IntArray
    offsets: IntArray
    sizes: IntArray
    copy: IntArray
    group: IntArray
    groups: tuple[tuple[int, ...], ...] = ()
    memo: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.tensor)

    def nbytes(self) -> IntArray:
        """(n,) bytes of each chunk."""
        return element_counts(self.sizes) * self.table.itemsizes()[self.tensor]

    def take(self, rows: IntArray | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Columns:
        """Some of the rows, in the given order."""
        return Columns(
            self.table,
            self.tensor[rows],
            self.rank[rows],
            self.offsets[rows],
            self.sizes[rows],
            self.copy[rows],
            self.group[rows],
            self.groups,
        )

    def by_rank(self, world_size: int) -> list[Columns]:
        """The rows of each rank, in order."""
        order = np.argsort(self.rank, kind="stable")
        bounds = np.searchsorted(self.rank[order], np.arange(1, world_size))
        return [self.take(rows) for rows in np.split(order, bounds)]

    def pack(self) -> bytes:
        """The rows as bytes, without the table."""
        numbers = (self.tensor, self.rank, self.copy, self.group)
        rows = np.concatenate([*(c.reshape(-1, 1) for c in numbers), self.offsets, self.sizes], axis=1)
        return bytes(rows.astype("<i8").tobytes())

    @staticmethod
    def unpack(table: TensorTable, data: bytes) -> Columns:
        """The inverse of `pack`, for the same table."""
        width = table.width
        rows = np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 4 + 2 * width)
        tensor, rank, copy, group = (rows[:, i] for i in range(4))
        return Columns(table, tensor, rank, rows[:, 4 : 4 + width], rows[:, 4 + width :], copy, group)

    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of every chunk, unpadded."""
        if "boxes" not in self.memo:
            self.memo["boxes"] = self._boxes()
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = self.memo["boxes"]
        return boxes

    def _boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        ndims = self.table.ndims()[self.tensor].tolist()
        rows = zip(ndims, self.offsets.tolist(), self.sizes.tolist(), strict=True)
        return [(tuple(offsets[:d]), tuple(sizes[:d])) for d, offsets, sizes in rows]

    def box(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of one chunk, unpadded."""
        d = len(self.table.shapes[int(self.tensor[row])])
        return tuple(self.offsets[row, :d].tolist()), tuple(self.sizes[row, :d].tolist())


@dataclass(frozen=True)
class Placed:
    """Where chunks lie: entries of files, as columns.

    An entry is a box of a tensor stored row-major at `start` bytes after the beginning of its file's
    data section. Chunk i is a sub-box of entry `entry[i]`. `memo` is as that of `Columns`.
    """

    files: tuple[str, ...]
    file_rank: IntArray
    entry: IntArray
    entry_tensor: IntArray
    entry_file: IntArray
    entry_start: IntArray
    entry_offsets: IntArray
    entry_sizes: IntArray
    memo: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def named(self, files: tuple[str, ...]) -> Placed:
        """The same places in files of other names. The memo is shared: nothing in it depends on names."""
        other = dataclasses.replace(self, files=files)
        object.__setattr__(other, "memo", self.memo)
        return other


@dataclass(frozen=True)
class Located:
    """Stored chunks that answer wanted boxes, as columns: row i takes a sub-box from one stored piece.

    Args:
        want: (n,) row of the wanted columns.
        file: (n,) number in `files`.
        start: (n,) bytes from the file's data section to the piece.
        piece_offsets, piece_sizes: (n, D) the stored piece's box.
        offsets, sizes: (n, D) the part of it that is wanted, in global coordinates.
    """

    files: tuple[str, ...]
    want: IntArray
    file: IntArray
    start: IntArray
    piece_offsets: IntArray
    piece_sizes: IntArray
    offsets: IntArray
    sizes: IntArray

    def __len__(self) -> int:
        return len(self.want)
