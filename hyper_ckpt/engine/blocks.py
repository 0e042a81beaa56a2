"""Whole blocks of stored pieces, which threads read and check side by side.

A block is digested right after it was read, while it is in the processor's cache. A step of Python costs much more
there than elsewhere, and threads that take turns in Python wait for each other. So each thread goes through many
blocks by iterators alone, and takes the next one when it is done with one: none waits at the end for another's share.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import msgspec

from hyper_ckpt.engine.digest import Digests, block_count
from hyper_ckpt.receipt import BLOCK_BYTES

GROUP_BYTES = 128 * BLOCK_BYTES
"""What threads share at a time; they hear of an interrupt, and of a failure of one of them, in between."""


class Piece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A stored piece: file, bytes from the file's beginning, bytes, digests of its blocks (None: not verified)."""

    name: str
    file: str
    base: int
    nbytes: int
    digests: Digests | None


class BlockRun(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Whole blocks of a piece with digests, one after the other: the byte of the piece where they begin, and what they
    fill."""

    piece: Piece
    start: int
    target: memoryview

    @property
    def place(self) -> tuple[str, int]:
        """Where they begin: the file, and bytes from its beginning."""
        return self.piece.file, self.piece.base + self.start


class Block(NamedTuple):
    """One of them: what a `ReadAt` is given to fill it, what it fills, its digest, and its number in the piece."""

    read: tuple[tuple[memoryview], int]
    view: memoryview
    digest: int
    piece: Piece
    number: int


@dataclass(eq=False)
class SharedBlocks:
    """Blocks of one file that some threads share.

    Args:
        runs: of one file.
        users: how often `take` will be called.
    """

    runs: Sequence[BlockRun]
    users: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _left: deque[Block | None] | None = None

    @property
    def file(self) -> str:
        """The file in which they lie."""
        return self.runs[0].piece.file

    def take(self) -> Iterator[Block]:
        """Blocks that no other user takes; the next is taken when it is asked for. Each user ends with a None."""
        with self._lock:
            if self._left is None:  # not before they are wanted: of a large load they are very many
                self._left = deque(self._blocks())
                self._left.extend([None] * self.users)
        return iter(self._left.popleft, None)

    def _blocks(self) -> Iterator[Block]:
        for run in self.runs:
            piece, first = run.piece, run.start // BLOCK_BYTES
            assert piece.digests is not None
            for number, digest in enumerate(piece.digests[first:][: block_count(len(run.target))].tolist(), first):
                low = number * BLOCK_BYTES
                view = run.target[low - run.start :][:BLOCK_BYTES]
                yield Block(((view,), piece.base + low), view, digest, piece, number)


def shared_groups(runs: Sequence[BlockRun], users: int) -> Iterator[SharedBlocks]:
    """Runs in the order in which they lie in files, in groups of about `GROUP_BYTES`."""
    for _, of_file in itertools.groupby(sorted(runs, key=attrgetter("place")), lambda run: run.piece.file):
        group: list[BlockRun] = []
        held = 0
        for run in of_file:
            for at in range(0, len(run.target), GROUP_BYTES):
                part = run.target[at : at + GROUP_BYTES]
                group.append(BlockRun(run.piece, run.start + at, part))
                held += len(part)
                if held >= GROUP_BYTES:
                    yield SharedBlocks(group, users)
                    group, held = [], 0
        if group:
            yield SharedBlocks(group, users)
