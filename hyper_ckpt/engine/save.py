"""Writes one rank's files: header, chunks with their digests, payloads, receipt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hyper_ckpt.box import cut, split_units
from hyper_ckpt.contracts.placement import FilePlan
from hyper_ckpt.contracts.platform import ByteBuffer, Carrier, LocalShard, Pending, Stager
from hyper_ckpt.contracts.store import ByteStore, Expect, Sink
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.engine.budget import Budget
from hyper_ckpt.engine.digest import Digests, block_count, block_digest, to_hex
from hyper_ckpt.engine.stage import settle
from hyper_ckpt.engine.workers import Task, run_all
from hyper_ckpt.errors import PlanError, StoreError
from hyper_ckpt.receipt import (
    BLOCK_BYTES,
    RECEIPT_FORMAT,
    ZERO_DIGEST,
    FileRecord,
    LocalPart,
    PieceRecord,
    Receipt,
    encode_receipt,
    receipt_name,
)
from hyper_ckpt.storage.safetensors_file import header_digest

SEGMENT_BYTES = 16 * BLOCK_BYTES
"""One task of a large piece."""
PACK_BYTES = 64 << 10
"""Pieces below this that follow each other are written together."""


class Source(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What a piece is cut from: a box of a shard, given in elements relative to the shard."""

    shard: LocalShard
    dtype: str
    view: Carrier | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class WritePiece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Bytes to write in one run: at `start` in the data section of file `file`."""

    name: str
    file: int
    start: int
    nbytes: int
    source: Source | bytes

    @property
    def key(self) -> tuple[int, int, int]:
        """Unique in the rank's files; an empty piece may share its start with the next."""
        return self.file, self.start, self.nbytes

    @property
    def is_staged(self) -> bool:
        """Whether the bytes must first be copied out of a device."""
        return type(self.source) is Source and self.source.view is None


@dataclass(frozen=True)
class WriteResult:
    """What a rank wrote: its receipt, that one's digest and size, and all names, for the case that the save fails."""

    receipt: Receipt
    receipt_digest: str
    receipt_size: int

    @property
    def names(self) -> list[str]:
        """Every object that this rank wrote."""
        return [*(f.name for f in self.receipt.files), receipt_name(self.receipt.rank, self.receipt.save_id)]


@dataclass(frozen=True, eq=False)
class SaveJob:
    """Everything that `write` needs of one rank. `progress` is told of bytes written, by any thread; `description`
    goes into the receipt."""

    store: ByteStore
    stager: Stager
    plans: Sequence[FilePlan]
    pieces: Sequence[WritePiece]
    save_id: str
    rank: int
    world_size: int
    threads: int
    budget: Budget
    durable: bool
    progress: Callable[[int], None]
    description: LocalPart | None = None


def write(job: SaveJob) -> WriteResult:
    """Writes a rank's files and then its receipt. If anything fails, what was written is removed.

    Raises:
        StoreError: naming the file, with the first cause.
        MemoryBudgetError: before anything is written.
    """
    staged = [p for p in job.pieces if p.is_staged]
    for piece in staged:
        assert isinstance(piece.source, Source)
        job.budget.require(_shard_bytes(piece.source), f"staging {piece.name!r}")
    files = _Files(job)
    try:
        files.open()
        run_all(files.tasks([p for p in job.pieces if not p.is_staged]), job.threads)
        for wave in _waves(staged, job.budget):
            _write_staged(files, wave)
        return files.finish()
    except BaseException:
        files.abort()
        raise


def staging_bytes(pieces: Sequence[WritePiece]) -> int:
    """The largest shard that must be copied out of a device."""
    return max((_shard_bytes(p.source) for p in pieces if isinstance(p.source, Source) and p.is_staged), default=0)


def _shard_bytes(source: Source) -> int:
    return int(np.prod(source.shard.sizes, dtype=np.int64)) * dtype_of(source.dtype).itemsize


def _waves(pieces: Sequence[WritePiece], budget: Budget) -> Iterator[dict[int, list[WritePiece]]]:
    """Groups pieces by shard, and shards into waves that fit the budget."""
    wave: dict[int, list[WritePiece]] = {}
    held = 0
    for piece in pieces:
        assert isinstance(piece.source, Source)
        key, size = id(piece.source.shard), _shard_bytes(piece.source)
        if key not in wave and wave and held + size > budget.limit:
            yield wave
            wave, held = {}, 0
        held += size if key not in wave else 0
        wave.setdefault(key, []).append(piece)
    if wave:
        yield wave


def _write_staged(files: _Files, wave: dict[int, list[WritePiece]]) -> None:
    """Copies the wave's shards to host buffers in the caller's thread, then writes their pieces."""
    stager, held = files.job.stager, []
    pending: list[Pending] = []
    try:
        ready: list[WritePiece] = []
        for pieces in wave.values():
            source = pieces[0].source
            assert isinstance(source, Source)
            nbytes = _shard_bytes(source)
            files.job.budget.acquire(nbytes)
            buffer = stager.buffer(nbytes)
            held.append((buffer, nbytes))
            pending.append(stager.copy_out(source.shard, buffer))
            view = buffer[:nbytes].view(dtype_of(source.dtype).carrier).reshape(source.shard.sizes)
            for p in pieces:
                assert isinstance(p.source, Source)
                source = Source(p.source.shard, p.source.dtype, view, p.source.offsets, p.source.sizes)
                ready.append(WritePiece(p.name, p.file, p.start, p.nbytes, source))
        for copy in pending:
            copy.wait()
        run_all(files.tasks(ready), files.job.threads)
    except BaseException:
        settle(pending)
        raise
    finally:
        for buffer, nbytes in held:
            stager.release(buffer)
            files.job.budget.release(nbytes)


def _flat(view: Carrier) -> ByteBuffer:
    return np.asarray(view.reshape(-1).view(np.uint8))


@dataclass(eq=False)
class _Files:
    """The open files of one rank, the digests of its pieces, and how many bytes were written."""

    job: SaveJob
    sinks: list[Sink] = field(default_factory=list)
    digests: dict[tuple[int, int, int], Digests] = field(default_factory=dict)
    written: int = 0
    receipt_written: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> None:
        """Creates every file with room for all of it, and writes the headers."""
        for plan in self.job.plans:
            self.sinks.append(self.job.store.create(plan.name, plan.size))
            self.sinks[-1].write_at(0, plan.header)
        for piece in self.job.pieces:
            self.digests[piece.key] = np.zeros(block_count(piece.nbytes), np.uint64)

    def tasks(self, pieces: Sequence[WritePiece]) -> list[Task]:
        """Tasks that write the pieces, in file order; small neighbours in one."""
        out: list[Task] = []
        packed: list[WritePiece] = []
        stop = (0, 0)  # file and byte where `packed` ends
        size = 0

        def flush() -> None:
            if packed:
                batch = packed.copy()
                packed.clear()
                out.append(lambda: self._write_packed(batch))

        for piece in sorted(pieces, key=lambda p: (p.file, p.start)):
            if piece.nbytes >= PACK_BYTES or (piece.file, piece.start) != stop or size > BLOCK_BYTES:
                flush()
                size = 0
            if piece.nbytes < PACK_BYTES:
                packed.append(piece)
                size, stop = size + piece.nbytes, (piece.file, piece.start + piece.nbytes)
            else:
                out += self._large(piece)
        flush()
        return out

    def _large(self, piece: WritePiece) -> list[Task]:
        view = self._view(piece)
        if not view.flags.c_contiguous:
            self.job.budget.require(BLOCK_BYTES, f"copying {piece.name!r}, which does not lie in one run,")
            return [lambda: self._write_strided(piece, view)]
        data = _flat(view)
        return [
            lambda at=at: self._write_blocks(piece, at, data[at : at + SEGMENT_BYTES])  # type: ignore[misc]
            for at in range(0, piece.nbytes, SEGMENT_BYTES)
        ]

    def _view(self, piece: WritePiece) -> Carrier:
        source = piece.source
        if isinstance(source, bytes):
            return np.frombuffer(source, np.uint8)
        assert source.view is not None
        whole = source.view.shape == source.sizes
        return source.view if whole else cut(source.view, source.offsets, source.sizes)

    def _write_blocks(self, piece: WritePiece, at: int, data: ByteBuffer) -> None:
        """Digests and writes whole blocks from `at` (a multiple of the block) while each is in the cache."""
        digests, base = self.digests[piece.key], len(self.job.plans[piece.file].header) + piece.start
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES].data
            digests[(at + start) // BLOCK_BYTES] = block_digest(block)
            self.sinks[piece.file].write_at(base + at + start, block)
        self._count(len(data))

    def _write_packed(self, pieces: list[WritePiece]) -> None:
        parts = [_flat(np.ascontiguousarray(self._view(p))) for p in pieces]
        for piece, part in zip(pieces, parts, strict=True):
            if piece.nbytes:
                self.digests[piece.key][0] = block_digest(part.data)
        first, data = pieces[0], np.concatenate(parts) if len(parts) > 1 else parts[0]
        self.sinks[first.file].write_at(len(self.job.plans[first.file].header) + first.start, data.data)
        self._count(len(data))

    def _write_strided(self, piece: WritePiece, view: Carrier) -> None:
        """Copies a strided view slab by slab into one buffer of whole blocks."""
        allowed = max(self.job.budget.limit // BLOCK_BYTES, 1) * BLOCK_BYTES
        room = min(SEGMENT_BYTES, block_count(piece.nbytes) * BLOCK_BYTES, allowed)
        dim = next((k for k in range(view.ndim) if view[(0,) * (k + 1)].nbytes <= BLOCK_BYTES), view.ndim - 1)
        units = int(np.prod(view.shape[: dim + 1], dtype=np.int64))
        step = max((BLOCK_BYTES * units) // piece.nbytes, 1)
        with self.job.budget.hold(room):
            buffer = self.job.stager.buffer(room)
            try:
                filled = done = 0
                for unit in range(0, units, step):
                    for offsets, sizes in split_units(view.shape, dim, unit, min(unit + step, units)):
                        rest = _flat(np.ascontiguousarray(cut(view, offsets, sizes)))
                        while len(rest):
                            n = min(room - filled, len(rest))
                            buffer[filled : filled + n] = rest[:n]
                            filled, rest = filled + n, rest[n:]
                            if filled == room:
                                self._write_blocks(piece, done, buffer[:filled])
                                done, filled = done + filled, 0
                if filled:
                    self._write_blocks(piece, done, buffer[:filled])
            finally:
                self.job.stager.release(buffer)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.written += nbytes
        self.job.progress(nbytes)

    def finish(self) -> WriteResult:
        """Completes the files, then publishes the receipt.

        Raises:
            PlanError: fewer or more bytes were written than planned.
        """
        planned = sum(plan.data_bytes for plan in self.job.plans)
        if self.written != planned:
            raise PlanError(f"rank {self.job.rank} wrote {self.written} bytes but its files are planned for {planned}")
        for sink in self.sinks:
            sink.close(sync=self.job.durable)
        receipt = self._receipt()
        data, digest = encode_receipt(receipt)
        self.receipt_written = True
        self.job.store.publish(
            receipt_name(self.job.rank, self.job.save_id), data, Expect.ABSENT, sync=self.job.durable
        )
        if self.job.durable:
            self.job.store.sync()
        self._check_present()
        return WriteResult(receipt, digest, len(data))

    def _check_present(self) -> None:
        """What somebody removed meanwhile must not be published.

        Raises:
            StoreError: a file is gone, or has another size.
        """
        for plan in self.job.plans:
            info = self.job.store.stat(plan.name)
            if info is None or info.size != plan.size:
                raise StoreError(
                    f"{self.job.store.url}/{plan.name} was removed or cut while it was being saved: find out by whom"
                )

    def _receipt(self) -> Receipt:
        job = self.job
        files = tuple(FileRecord(p.name, p.size, len(p.header), header_digest(p.header), job.rank) for p in job.plans)
        pieces: list[PieceRecord] = []
        payloads: dict[str, int] = {}
        for piece in job.pieces:
            if isinstance(piece.source, bytes):
                payloads[piece.name] = len(pieces)
            digests = to_hex(self.digests[piece.key])
            pieces.append(PieceRecord(piece.file, piece.start, piece.nbytes, digests))
        return Receipt(
            RECEIPT_FORMAT,
            1,
            ZERO_DIGEST,
            job.save_id,
            job.rank,
            job.world_size,
            BLOCK_BYTES,
            files,
            tuple(pieces),
            payloads,
            job.description,
        )

    def abort(self) -> None:
        """Removes everything that was written. Never raises."""
        for sink in self.sinks:
            sink.abort()
        if self.receipt_written:
            discard(self.job.store, [receipt_name(self.job.rank, self.job.save_id)])


def discard(store: ByteStore, names: Sequence[str]) -> None:
    """Removes objects of a failed save as far as that is possible; what stays is removed by a later save."""
    for name in names:
        try:
            store.delete(name)
        except Exception:  # the failure that led here is the one to report
            continue
