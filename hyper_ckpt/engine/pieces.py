"""Reads parts of stored pieces, verified block by block."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from hyper_ckpt.box import IntArray, contiguous_dim, cut
from hyper_ckpt.contracts.platform import Carrier, Stager
from hyper_ckpt.contracts.store import ByteStore, ReadInto
from hyper_ckpt.engine.budget import Budget
from hyper_ckpt.engine.digest import Digests, block_count, block_digest
from hyper_ckpt.engine.workers import Task
from hyper_ckpt.errors import DigestError
from hyper_ckpt.host_memory import bytes_at
from hyper_ckpt.receipt import BLOCK_BYTES

RUN_BYTES = 32 * BLOCK_BYTES
"""One task of a large run."""
SEGMENT_BYTES = 16 * BLOCK_BYTES
"""The most that is read at once for a strided one."""
SMALL_BYTES = 64 << 10
"""Pieces up to this are read together."""
MAX_GAP_BYTES = 64 << 10
"""Unwanted bytes between two runs up to which one read over both is cheaper."""


class Piece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A stored piece: file, bytes from the file's beginning, bytes, digests of its blocks (None: not verified)."""

    name: str
    file: str
    base: int
    nbytes: int
    digests: Digests | None


@dataclass(frozen=True, eq=False)
class SmallPieces:
    """Stored pieces of one file, of 1 to `SMALL_BYTES` bytes, in the order in which they lie there. Columns, like the
    fields of `Piece`; each has the digest of its only block (None: not verified)."""

    file: str
    names: list[str]
    bases: IntArray
    sizes: IntArray
    digests: Digests | None


@dataclass(frozen=True, eq=False)
class PieceReader:
    """Reads from pieces into host memory.

    Args:
        scratch_bytes: the most that one task holds besides the target.
        progress: told of bytes that reached a target, by any thread.
        fills: whether what is read goes into a target, for the text of errors.
    """

    store: ByteStore
    stager: Stager
    budget: Budget
    scratch_bytes: int
    progress: Callable[[int], None]
    fills: bool = True

    def tasks(
        self, piece: Piece, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], target: Carrier
    ) -> Iterator[Task]:
        """Tasks that fill `target` with a sub-box of a piece.

        Args:
            piece: stores a box of `shape` elements, row-major.
            offsets, sizes: the sub-box, relative to the piece.
            target: carriers of shape `sizes`.
        """
        strides = _strides(shape)
        if contiguous_dim(shape, sizes) == 0 and target.flags.c_contiguous:
            start = sum(o * s for o, s in zip(offsets, strides, strict=True)) * target.itemsize
            yield from self._runs(piece, start, target.reshape(-1).view(np.uint8))
            return
        for low, part in _slabs(offsets, sizes, strides, target.itemsize, self.scratch_bytes - 2 * BLOCK_BYTES):
            inner = cut(target, [a - o for a, o in zip(low, offsets, strict=True)], part)
            yield lambda low=low, part=part, inner=inner: self._read_slab(piece, strides, low, part, inner)  # type: ignore[misc]

    def small_tasks(self, pieces: SmallPieces, targets: Sequence[Carrier | int]) -> Iterator[Task]:
        """Tasks that fill contiguous targets, arrays or addresses, with small pieces, whole, many to a task."""
        batch = np.cumsum(pieces.sizes) // (BLOCK_BYTES - SMALL_BYTES)
        bounds = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(targets)]
        for low, high in itertools.pairwise(bounds):
            yield lambda low=low, high=high: self._read_small(pieces, targets, low, high)  # type: ignore[misc]

    def _read_small(self, pieces: SmallPieces, targets: Sequence[Carrier | int], low: int, high: int) -> None:
        """Reads pieces side by side into one buffer, those that follow each other at once, and passes them on."""
        bases, sizes = pieces.bases[low:high], pieces.sizes[low:high]
        ends = np.cumsum(sizes)
        first = np.flatnonzero(np.diff(bases, prepend=-1) != np.concatenate([[0], sizes[:-1]]))
        begin, total = ends - sizes, int(ends[-1])
        spans = np.diff(begin[first], append=total)
        with self.budget.hold(total):
            buffer = self.stager.buffer(total)
            try:
                data = buffer.data
                parts = [data[at : at + span] for at, span in zip(begin[first].tolist(), spans.tolist(), strict=True)]
                self.store.read_into(pieces.file, [*zip(bases[first].tolist(), spans.tolist(), strict=True)], parts)
                at = 0
                digests = [None] * len(sizes) if pieces.digests is None else pieces.digests[low:high].tolist()
                for end, digest, target in zip(ends.tolist(), digests, targets[low:high], strict=True):
                    block = data[at:end]
                    if digest is not None and block_digest(block) != digest:
                        number = int(np.searchsorted(ends, end))
                        raise self._damaged(pieces.names[low + number], pieces.file, int(bases[number]), len(block))
                    into = bytes_at(target, end - at) if isinstance(target, int) else target.data.cast("B")
                    into[:] = block
                    at = end
            finally:
                self.stager.release(buffer)
        self.progress(total)

    def verify_tasks(
        self, piece: Piece, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], itemsize: int
    ) -> Iterator[Task]:
        """Tasks that check the blocks that a sub-box touches, without a target."""
        strides = _strides(shape)
        blocks: set[int] = set()
        for low, part in _slabs(offsets, sizes, strides, itemsize, self.scratch_bytes):
            start, span = _span(low, part, strides, itemsize)
            blocks.update(range(start // BLOCK_BYTES, block_count(start + span)))
        for number in sorted(blocks):
            yield lambda number=number: self._check_block(piece, number)  # type: ignore[misc]

    def _check_block(self, piece: Piece, number: int) -> None:
        read = functools.partial(self.store.read_into, piece.file)
        with self.budget.hold(BLOCK_BYTES), self._block(read, piece, number):
            pass

    def _runs(self, piece: Piece, start: int, target: Carrier) -> Iterator[Task]:
        """Tasks for one contiguous run, cut where blocks begin."""
        stop, at = start + len(target), start
        while at < stop:
            end = min((at // RUN_BYTES + 1) * RUN_BYTES, stop)
            yield lambda at=at, end=end: self._run(piece, at, target[at - start : end - start])  # type: ignore[misc]
            at = end

    def _run(self, piece: Piece, start: int, target: Carrier) -> None:
        # All that a task may hold is taken at once: tasks that hold some and want more could wait for each other.
        with self.budget.hold(BLOCK_BYTES):
            self.read_run(piece, start, target.data)
        self.progress(len(target))

    def read_run(self, piece: Piece, start: int, target: memoryview) -> None:
        """Fills `target` with bytes from `start` of the piece; whole blocks go straight into it.

        Raises:
            DigestError: a block is damaged.
        """
        if piece.digests is None:
            self.store.read_into(piece.file, [(piece.base + start, len(target))], [target])
            return
        with self.store.reader(piece.file) as read:
            self._read_verified(read, piece, start, target)

    def _read_verified(self, read: ReadInto, piece: Piece, start: int, target: memoryview) -> None:
        """Reads whole blocks into the target, parts of blocks beside it, and checks each while it is in the cache."""
        assert piece.digests is not None
        stop = start + len(target)
        first, last = start // BLOCK_BYTES, block_count(stop)
        # Nothing is looked up in the loop: what is not in the cache costs more than the digest of a block.
        for number, digest in enumerate(piece.digests[first:last].tolist(), first):
            low = number * BLOCK_BYTES
            high = min(low + BLOCK_BYTES, piece.nbytes)
            if start <= low and high <= stop:
                block = target[low - start : high - start]
                read([(piece.base + low, high - low)], [block])
                if block_digest(block) != digest:
                    raise self._damaged(piece.name, piece.file, piece.base + low, high - low)
            else:
                with self._block(read, piece, number) as block:
                    begin, end = max(start, low), min(stop, high)
                    target[begin - start : end - start] = block[begin - low : end - low]

    @contextmanager
    def _block(self, read: ReadInto, piece: Piece, number: int) -> Iterator[memoryview]:
        """One block in a buffer of its own, checked."""
        low = number * BLOCK_BYTES
        buffer = self.stager.buffer(BLOCK_BYTES)
        try:
            block = buffer.data[: min(BLOCK_BYTES, piece.nbytes - low)]
            read([(piece.base + low, len(block))], [block])
            self._check(piece, number, block)
            yield block
        finally:
            self.stager.release(buffer)

    def _check(self, piece: Piece, number: int, block: memoryview) -> None:
        if piece.digests is not None and block_digest(block) != int(piece.digests[number]):
            raise self._damaged(piece.name, piece.file, piece.base + number * BLOCK_BYTES, len(block))

    def _damaged(self, name: str, file: str, start: int, nbytes: int) -> DigestError:
        filled = "The target may be partly filled: load" if self.fills else "Nothing was loaded: load"
        return DigestError(
            f"{self.store.url}/{file}: bytes {start} to {start + nbytes} ({name!r}) differ from what was saved. "
            f"{filled} an earlier checkpoint"
        )

    def _read_slab(
        self, piece: Piece, strides: tuple[int, ...], low: tuple[int, ...], sizes: tuple[int, ...], target: Carrier
    ) -> None:
        """Reads the span of a sub-box and copies the box out of it."""
        start, span = _span(low, sizes, strides, target.itemsize)
        with self.budget.hold(span + BLOCK_BYTES):
            buffer = self.stager.buffer(span)
            try:
                self.read_run(piece, start, buffer.data[:span])
                steps = tuple(s * target.itemsize for s in strides)
                target[...] = np.ndarray(sizes, target.dtype, buffer, 0, steps)
            finally:
                self.stager.release(buffer)
        self.progress(target.nbytes)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def _span(low: Sequence[int], sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Where a sub-box begins in its piece and how many bytes it spans, gaps included."""
    start = sum(a * s for a, s in zip(low, strides, strict=True))
    return start * itemsize, (sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1) * itemsize


def _slabs(
    offsets: tuple[int, ...], sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int, limit: int, dim: int = 0
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a sub-box into parts that span at most `limit` bytes and have no large gaps."""
    if dim == len(sizes):
        yield offsets, sizes
        return
    _, inner = _span(offsets, (1,) * (dim + 1) + sizes[dim + 1 :], strides, itemsize)
    step = strides[dim] * itemsize
    apart = inner > limit or step - inner > MAX_GAP_BYTES
    count = 1 if apart else max((limit - inner) // step + 1, 1)
    for at in range(0, sizes[dim], count):
        n = min(count, sizes[dim] - at)
        low = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        part = (*sizes[:dim], n, *sizes[dim + 1 :])
        if n == 1:
            yield from _slabs(low, part, strides, itemsize, limit, dim + 1)
        else:
            yield low, part
