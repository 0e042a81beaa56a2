"""Copies of what a save will write, so that the state may change while it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hyper_ckpt.box import cut
from hyper_ckpt.contracts.platform import ByteBuffer, Carrier, Pending, Stager
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.engine.save import Source, WritePiece
from hyper_ckpt.engine.stage import settle
from hyper_ckpt.engine.workers import Task, run_all

SEGMENT_BYTES = 8 << 20
"""One task of a large copy."""
_ALIGNMENT = 64
_BATCH_BYTES = 1 << 20


class Pool(Protocol):
    """Where buffers come from and go back to. A `Stager` is one."""

    def buffer(self, nbytes: int) -> ByteBuffer: ...

    def release(self, buffer: ByteBuffer) -> None: ...


@dataclass(frozen=True)
class Snapshot:
    """Pieces that no longer depend on the state once `wait` has returned.

    Args:
        pieces: in the order given.
        pending: copies under way.
        release: gives the buffers back, once no copy uses them any more.
    """

    pieces: list[WritePiece]
    pending: tuple[Pending, ...]
    release: Callable[[], None]

    def wait(self) -> None:
        """Returns when every copy is complete; from any thread, also several times."""
        for copy in self.pending:
            copy.wait()


def snapshot_bytes(pieces: Sequence[WritePiece]) -> int:
    """Host memory that `snapshot` takes: shards outside host memory whole, else only what is written."""
    host = sum(_aligned(p.nbytes) for p in pieces if _is_copied(p))
    return host + sum(_shard_bytes(source) for source in _staged_shards(pieces).values())


def snapshot(pieces: Sequence[WritePiece], stager: Stager, pool: Pool, threads: int) -> Snapshot:
    """Copies the sources of pieces: of host memory at once, of a device as the stager does. In the caller's thread.

    Args:
        pool: where the buffers come from: the stager itself, or shared memory.
    """
    buffers: list[ByteBuffer] = []
    pending: list[Pending] = []

    def release() -> None:
        settle(pending)
        while buffers:
            pool.release(buffers.pop())

    try:
        staged: dict[int, Carrier] = {}
        for key, source in _staged_shards(pieces).items():
            buffers.append(pool.buffer(_shard_bytes(source)))
            pending.append(stager.copy_out(source.shard, buffers[-1]))
            staged[key] = _as_carriers(buffers[-1][: _shard_bytes(source)], source.dtype, source.shard.sizes)
        copied = [p for p in pieces if _is_copied(p)]
        if copied:
            buffers.append(pool.buffer(sum(_aligned(p.nbytes) for p in copied)))
        places = _places(copied, buffers[-1]) if copied else {}
        run_all(_copy_tasks(copied, places), threads)
        return Snapshot([_moved(p, staged, places) for p in pieces], tuple(pending), release)
    except BaseException:
        release()
        raise


def _is_copied(piece: WritePiece) -> bool:
    return isinstance(piece.source, Source) and piece.source.view is not None and piece.nbytes > 0


def _staged_shards(pieces: Sequence[WritePiece]) -> dict[int, Source]:
    """One source of each shard that lies outside host memory."""
    return {id(p.source.shard): p.source for p in pieces if isinstance(p.source, Source) and p.is_staged}


def _shard_bytes(source: Source) -> int:
    return math.prod(source.shard.sizes) * dtype_of(source.dtype).itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _as_carriers(flat: ByteBuffer, dtype: str, sizes: tuple[int, ...]) -> Carrier:
    view: Carrier = flat.view(dtype_of(dtype).carrier).reshape(sizes)
    return view


def _places(pieces: Sequence[WritePiece], buffer: ByteBuffer) -> dict[int, Carrier]:
    """Where each piece goes, one after the other."""
    out, at = {}, 0
    for piece in pieces:
        assert isinstance(piece.source, Source)
        out[id(piece)] = _as_carriers(buffer[at : at + piece.nbytes], piece.source.dtype, piece.source.sizes)
        at += _aligned(piece.nbytes)
    return out


def _copy_tasks(pieces: Sequence[WritePiece], places: dict[int, Carrier]) -> Iterator[Task]:
    """Small pieces many to a task, large ones several tasks to a piece."""
    batch: list[tuple[Carrier, Carrier]] = []
    held = 0
    for piece in pieces:
        assert isinstance(piece.source, Source)
        assert piece.source.view is not None
        into, source = places[id(piece)], cut(piece.source.view, piece.source.offsets, piece.source.sizes)
        if piece.nbytes <= SEGMENT_BYTES or not source.flags.c_contiguous:
            batch.append((into, source))
            held += piece.nbytes
        else:
            flat, flat_source = into.reshape(-1), source.reshape(-1)
            step = SEGMENT_BYTES // flat.itemsize
            for at in range(0, flat.size, step):
                part = slice(at, at + step)
                yield lambda a=flat[part], b=flat_source[part]: np.copyto(a, b)  # type: ignore[misc]
        if held >= _BATCH_BYTES:
            yield lambda rows=batch: _copy(rows)  # type: ignore[misc]
            batch, held = [], 0
    if batch:
        yield lambda rows=batch: _copy(rows)  # type: ignore[misc]


def _copy(rows: Sequence[tuple[Carrier, Carrier]]) -> None:
    for into, source in rows:
        np.copyto(into, source)


def _moved(piece: WritePiece, staged: dict[int, Carrier], places: dict[int, Carrier]) -> WritePiece:
    """The piece, cut from its copy."""
    if not isinstance(piece.source, Source):
        return piece
    if id(piece) in places:
        none = (0,) * len(piece.source.sizes)
        return _from(piece, places[id(piece)], none)
    if piece.is_staged:
        return _from(piece, staged[id(piece.source.shard)], piece.source.offsets)
    return piece


def _from(piece: WritePiece, view: Carrier, offsets: tuple[int, ...]) -> WritePiece:
    assert isinstance(piece.source, Source)
    source = Source(piece.source.shard, piece.source.dtype, view, offsets, piece.source.sizes)
    return WritePiece(piece.name, piece.file, piece.start, piece.nbytes, source)
