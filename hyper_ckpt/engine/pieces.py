"""Reads parts of stored pieces, verified block by block."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hyper_ckpt.box import IntArray, contiguous_dim, cut
from hyper_ckpt.contracts.platform import Carrier, Stager
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.engine.blocks import BlockRun, Piece, SharedBlocks, shared_groups
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
        self,
        piece: Piece,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        target: Carrier,
        whole: list[BlockRun],
    ) -> Iterator[Task]:
        """Tasks that fill `target` with a sub-box of a piece.

        Args:
            piece: stores a box of `shape` elements, row-major.
            offsets, sizes: the sub-box, relative to the piece.
            target: carriers of shape `sizes`.
            whole: the whole blocks that are to be read besides, by `block_tasks`, are added here.
        """
        strides = _strides(shape)
        if contiguous_dim(shape, sizes) == 0 and target.flags.c_contiguous:
            start = sum(o * s for o, s in zip(offsets, strides, strict=True)) * target.itemsize
            yield from self._runs(piece, start, target.reshape(-1).view(np.uint8).data, whole)
            return
        for low, part in _slabs(offsets, sizes, strides, target.itemsize, self.scratch_bytes - 2 * BLOCK_BYTES):
            inner = cut(target, [a - o for a, o in zip(low, offsets, strict=True)], part)
            yield lambda low=low, part=part, inner=inner: self._read_slab(piece, strides, low, part, inner)  # type: ignore[misc]

    def small_tasks(self, pieces: SmallPieces, targets: Sequence[Carrier | int]) -> Iterator[Task]:
        """Tasks that fill targets, arrays or addresses, with small pieces, whole, many to a task."""
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
                    if isinstance(target, int):
                        bytes_at(target, end - at)[:] = block
                    else:
                        target[...] = np.frombuffer(block, target.dtype).reshape(target.shape)
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
        with self.budget.hold(BLOCK_BYTES), self._block(piece, number):
            pass

    def block_tasks(self, runs: Sequence[BlockRun], threads: int) -> Iterator[Task]:
        """Tasks that fill runs of whole blocks. Several threads share each group of them."""
        for shared in shared_groups(runs, threads):
            for _ in range(threads):
                yield lambda shared=shared: self.progress(self._read_blocks(shared))  # type: ignore[misc]

    def _runs(self, piece: Piece, start: int, target: memoryview, whole: list[BlockRun]) -> Iterator[Task]:
        """Tasks for one contiguous run, besides the whole blocks in it."""
        if piece.digests is None:
            for at in range(0, len(target), RUN_BYTES):
                part = target[at : at + RUN_BYTES]
                yield lambda at=at, part=part: self._run(piece, start + at, part)  # type: ignore[misc]
            return
        blocks, parts = _split(piece, start, target)
        whole += blocks
        for at, part in parts:
            yield lambda at=at, part=part: self._run(piece, at, part)  # type: ignore[misc]

    def _run(self, piece: Piece, start: int, target: memoryview) -> None:
        # All that a task may hold is taken at once: tasks that hold some and want more could wait for each other.
        with self.budget.hold(0 if piece.digests is None else BLOCK_BYTES):
            self.read_run(piece, start, target)
        self.progress(len(target))

    def read_run(self, piece: Piece, start: int, target: memoryview) -> None:
        """Fills `target` with bytes from `start` of the piece; whole blocks go straight into it.

        Raises:
            DigestError: a block is damaged.
        """
        if piece.digests is None:
            self.store.read_into(piece.file, [(piece.base + start, len(target))], [target])
            return
        blocks, parts = _split(piece, start, target)
        for shared in shared_groups(blocks, 1):
            self._read_blocks(shared)
        for at, part in parts:
            with self._block(piece, at // BLOCK_BYTES) as block:
                part[:] = block[at % BLOCK_BYTES :][: len(part)]

    def _read_blocks(self, shared: SharedBlocks) -> int:
        """Reads and checks blocks until none is left. Returns the bytes."""
        # Three views of one iterator: `blocks` still has all when a read has failed, also the one that it was to fill.
        reads, digests, blocks = itertools.tee(shared.take(), 3)
        found: list[tuple[int, int]] = []
        # No step of Python between a read and its digest.
        with contextlib.suppress(OSError), self.store.reader(shared.file) as read:
            filled = itertools.starmap(read, map(_READ, reads))
            found = [*zip(filled, map(block_digest, map(_VIEW, digests)), strict=False)]
        total = 0
        for block, result in itertools.zip_longest(blocks, found):
            # What was not read, not whole, or is not what was saved, is read again: that says what is wrong.
            if result != (len(block.view), block.digest):
                self.store.read_into(shared.file, [(block.read[1], len(block.view))], [block.view])
                self._check(block.piece, block.number, block.view)
            total += len(block.view)
        return total

    @contextmanager
    def _block(self, piece: Piece, number: int) -> Iterator[memoryview]:
        """One block in a buffer of its own, checked."""
        low = number * BLOCK_BYTES
        buffer = self.stager.buffer(BLOCK_BYTES)
        try:
            block = buffer.data[: min(BLOCK_BYTES, piece.nbytes - low)]
            self.store.read_into(piece.file, [(piece.base + low, len(block))], [block])
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


def _split(piece: Piece, start: int, target: memoryview) -> tuple[list[BlockRun], list[tuple[int, memoryview]]]:
    """What `target` wants from `start` of a piece on: whole blocks, of which the last of a piece may be short, and what
    is only a part of the first or the last block, with the byte of the piece where that begins."""
    stop = start + len(target)
    low = block_count(start) * BLOCK_BYTES
    high = stop if stop == piece.nbytes else stop // BLOCK_BYTES * BLOCK_BYTES
    if low >= high:  # parts of one block or of two
        low = high = min(low, stop)
    runs = [BlockRun(piece, low, target[low - start : high - start])] if low < high else []
    ends = [(start, target[: low - start]), (high, target[high - start :])]
    return runs, [(at, part) for at, part in ends if len(part)]


_READ, _VIEW = operator.attrgetter("read"), operator.attrgetter("view")


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
