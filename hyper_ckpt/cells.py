"""Where the chunks of a stored tensor lie in it: cells of a grid, or boxes that are listed one by one.

A grid is small, but has a cell for every combination of its cuts: its cells are found and expanded only where they are
wanted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hyper_ckpt.box import IntArray, element_counts, intersect, pad, uncovered

_PAIRS = 1 << 18
"""Wanted boxes times listed boxes that are compared at once."""


@dataclass(frozen=True, eq=False)
class GridCells:
    """The cells of a grid over a shape, row-major.

    Args:
        cuts: per dimension, where cells begin.
        shape: in elements.
        file: (n,) the number of each cell's file.
    """

    cuts: tuple[IntArray, ...]
    shape: tuple[int, ...]
    file: IntArray
    _least: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.file)

    @property
    def lengths(self) -> tuple[IntArray, ...]:
        """Per dimension, the lengths of the cells."""
        return tuple(np.diff(np.append(c, n)) for c, n in zip(self.cuts, self.shape, strict=True))

    @property
    def offsets(self) -> IntArray:
        """(n, d), all of them."""
        return self._expanded(self.cuts)

    @property
    def sizes(self) -> IntArray:
        """(n, d), all of them."""
        return self._expanded(self.lengths)

    def boxes(self, cells: IntArray) -> tuple[IntArray, IntArray]:
        """Offsets and sizes of some cells."""
        if not self.shape:
            return np.zeros((len(cells), 0), np.int64), np.zeros((len(cells), 0), np.int64)
        index = np.unravel_index(cells, [len(c) for c in self.cuts])
        low = [c[i] for c, i in zip(self.cuts, index, strict=True)]
        high = [np.append(c[1:], n)[i] for c, n, i in zip(self.cuts, self.shape, index, strict=True)]
        offsets = np.stack(low, axis=1)
        return offsets, np.stack(high, axis=1) - offsets

    def touching(self, offsets: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray]:
        """Pairs of a box, none of them empty, and a cell that have elements in common."""
        first = [np.searchsorted(c, offsets[:, d], side="right") - 1 for d, c in enumerate(self.cuts)]
        last = [np.searchsorted(c, offsets[:, d] + sizes[:, d], side="left") for d, c in enumerate(self.cuts)]
        found = []
        for row in range(len(offsets)):
            cell = np.zeros(1, np.int64)
            for d, c in enumerate(self.cuts):
                own = np.arange(first[d][row], last[d][row], dtype=np.int64)
                cell = (cell[:, None] * len(c) + own).reshape(-1)
            found.append(cell)
        want = np.repeat(np.arange(len(found)), [len(cell) for cell in found])
        return want, np.concatenate(found) if found else np.zeros(0, np.int64)

    def cuts_of(self, d: int) -> tuple[int, int, int]:
        """How often the tensor is cut in a dimension, and the smallest and the largest piece."""
        lengths = self.lengths[d]
        return len(lengths), int(lengths.min()), int(lengths.max())

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Whether the cells cover a tensor exactly once."""
        return True

    def slack(self, itemsize: int, room: IntArray) -> IntArray:
        """(n,) the last byte of its file's data section at which each cell can start, below 0 if it does not fit."""
        counts = functools.reduce(np.multiply.outer, self.lengths, np.ones((), np.int64)).reshape(-1)
        return np.asarray(room[self.file] - counts * itemsize)

    def least_slack(self, itemsize: int, room: IntArray) -> int:
        """The least of `slack`."""
        if itemsize not in self._least:
            self._least[itemsize] = int(self.slack(itemsize, room).min())
        return self._least[itemsize]

    def _expanded(self, parts: Sequence[IntArray]) -> IntArray:
        if not parts:
            return np.zeros((1, 0), np.int64)
        return np.stack([a.reshape(-1) for a in np.meshgrid(*parts, indexing="ij")], axis=1)


@dataclass(frozen=True, eq=False)
class ListedCells:
    """Boxes (n, d) inside a tensor, and the number of each one's file (n,)."""

    offsets: IntArray
    sizes: IntArray
    file: IntArray

    def __len__(self) -> int:
        return len(self.file)

    def boxes(self, cells: IntArray) -> tuple[IntArray, IntArray]:
        """As of `GridCells`, and so are the others."""
        return self.offsets[cells], self.sizes[cells]

    def touching(self, offsets: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray]:
        step = max(_PAIRS // max(len(self.file), 1), 1)
        found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        for low in range(0, len(offsets), step):
            part = slice(low, low + step)
            _, _, hit = intersect(offsets[part, None], sizes[part, None], self.offsets[None], self.sizes[None])
            want, cell = np.nonzero(hit)
            found.append((want + low, cell))
        wants, cells = zip(*found, strict=True)
        return np.concatenate(wants), np.concatenate(cells)

    def cuts_of(self, d: int) -> tuple[int, int, int]:
        sizes = self.sizes[:, d]
        return len(np.unique(self.offsets[:, d])), int(sizes.min()), int(sizes.max())

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        width = max(len(shape), 1)
        offsets, sizes = pad(self.offsets, width, 0), pad(self.sizes, width, 1)
        return not len(uncovered(np.zeros(len(offsets), np.int64), offsets, sizes, np.array([shape or (1,)], np.int64)))

    def slack(self, itemsize: int, room: IntArray) -> IntArray:
        return np.asarray(room[self.file] - element_counts(self.sizes) * itemsize)

    def least_slack(self, itemsize: int, room: IntArray) -> int:
        return int(self.slack(itemsize, room).min()) if len(self.file) else 0


@dataclass(frozen=True, eq=False)
class Chunks:
    """The stored chunks of one copy of a tensor: where each lies in it, in which file, and where it starts there, bytes
    from the data section; one number where all are equal."""

    cells: GridCells | ListedCells
    starts: int | IntArray

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def offsets(self) -> IntArray:
        """(n, d)."""
        return self.cells.offsets

    @property
    def sizes(self) -> IntArray:
        """(n, d)."""
        return self.cells.sizes

    @property
    def file(self) -> IntArray:
        """(n,) numbers of files."""
        return self.cells.file

    @property
    def start(self) -> IntArray:
        """(n,)."""
        return self.starts_of(np.arange(len(self)))

    def starts_of(self, cells: IntArray) -> IntArray:
        """Of some chunks."""
        return np.full(len(cells), self.starts, np.int64) if isinstance(self.starts, int) else self.starts[cells]

    def same_as(self, other: Chunks) -> bool:
        """Whether both are the same bytes, and these the same boxes."""
        if self.cells is other.cells and isinstance(self.starts, int) and isinstance(other.starts, int):
            return self.starts == other.starts
        pairs = [(self.offsets, other.offsets), (self.sizes, other.sizes), (self.file, other.file)]
        return all(np.array_equal(x, y) for x, y in [*pairs, (self.start, other.start)])


def grid_cells(cuts: tuple[IntArray, ...], shape: tuple[int, ...], file: IntArray) -> GridCells:
    """The cells of a grid, checked in time and memory of the cuts.

    Raises:
        ValueError: they are no cells of a tensor of this shape.
    """
    if len(cuts) != len(shape):
        raise ValueError("the grid does not fit")
    if math.prod([len(c) for c in cuts]) != len(file):
        raise ValueError("the grid has not one file per cell")
    for c, n in zip(cuts, shape, strict=True):
        if c[0] != 0 or c[-1] >= n:
            raise ValueError("the grid does not begin at 0, or leaves the tensor")
    return GridCells(cuts, shape, file)
