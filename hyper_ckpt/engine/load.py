"""Reads what one rank wants, and passes on what several ranks want."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_ckpt.box import cut
from hyper_ckpt.columns import Columns, Located
from hyper_ckpt.contracts.platform import ByteBuffer, Carrier, LocalShard, Pending, Ranks, Stager
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.engine.budget import Budget
from hyper_ckpt.engine.pieces import SEGMENT_BYTES, Piece, PieceReader
from hyper_ckpt.engine.workers import Task, run_all
from hyper_ckpt.errors import FileSizeError, HeaderError, ManifestError, MissingFileError, PlanError
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.receipt import (
    BLOCK_BYTES,
    RECEIPT_FORMAT,
    FileRecord,
    PieceRecord,
    Receipt,
    decode_receipt,
    receipt_name,
)
from hyper_ckpt.storage.safetensors_file import MAX_HEADER_BYTES, header_digest

PACK_BYTES = 1 << 20
"""Shared boxes below this are passed on in one message."""
MAX_RECEIPT_BYTES = 4 << 30
"""A receipt is read whole. It takes some 35 bytes a block of 512 KiB, and 50 a piece."""


@dataclass(eq=False)
class Target:
    """One shard to fill. `view` is its memory, or a staging buffer that is copied in at the end."""

    name: str
    shard: LocalShard
    dtype: str
    view: Carrier | None
    staging: ByteBuffer | None = None
    remaining: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return int(np.prod(self.shard.sizes, dtype=np.int64)) * dtype_of(self.dtype).itemsize

    @property
    def staged(self) -> bool:
        """Whether it is filled through a host buffer."""
        return self.view is None or self.staging is not None


class Stored:
    """What is stored, opened for reading: files are checked once each, receipts read when needed."""

    def __init__(self, store: ByteStore, manifest: Manifest, verify: bool) -> None:
        self._store, self._manifest, self._verify = store, manifest, verify
        self.world_size = manifest.world_size
        self._pieces: dict[int, dict[tuple[str, int, int], PieceRecord]] = {}
        self._receipts: dict[int, Receipt] = {}
        self._payloads: dict[tuple[int, str], bytes | None] = {}
        self._checked: set[str] = set()
        self._listed = {file.name: file for file in manifest.files}

    def check_files(self, numbers: Sequence[int]) -> None:
        """Checks that files exist and have the recorded sizes and headers, and reads the receipts that verifying needs.

        Raises:
            MissingFileError, FileSizeError, HeaderError: naming the file.
        """
        for number in numbers:
            self._check(self._manifest.files[number])
            if self._verify:
                self.receipt(self._manifest.files[number].rank)

    def _check(self, record: FileRecord) -> None:
        if record.name not in self._checked:
            check_file(self._store, record)
            self._checked.add(record.name)

    def receipt(self, rank: int) -> Receipt:
        """A rank's receipt, read once."""
        if rank not in self._receipts:
            self._receipts[rank] = read_receipt(self._store, self._manifest, rank, self._listed)
        return self._receipts[rank]

    def piece(self, name: str, file: int, start: int, nbytes: int) -> Piece:
        """A stored piece, with its digests if it is to be verified."""
        record = self._manifest.files[file]
        digests = self._digests(record, start, nbytes) if self._verify else None
        return Piece(name, record.name, record.data_start + start, nbytes, digests)

    def payload(self, rank: int, name: str) -> bytes | None:
        """A payload that a rank saved, verified, read once; None if it saved none of this name."""
        if (rank, name) not in self._payloads:
            self._payloads[rank, name] = self._read_payload(rank, name)
        return self._payloads[rank, name]

    def _read_payload(self, rank: int, name: str) -> bytes | None:
        receipt = self.receipt(rank)
        if name not in receipt.payloads:
            return None
        piece = receipt.pieces[receipt.payloads[name]]
        file = receipt.files[piece.file]
        self._check(file)
        data = bytearray(piece.nbytes)
        stored = Piece(name, file.name, file.data_start + piece.start, piece.nbytes, piece.blocks())
        reader = PieceReader(self._store, _NoStager(), Budget(SEGMENT_BYTES), SEGMENT_BYTES, fills=False)
        reader.read_run(stored, 0, memoryview(data))
        return bytes(data)

    def _digests(self, file: FileRecord, start: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        if file.rank not in self._pieces:
            receipt = self.receipt(file.rank)
            names = [f.name for f in receipt.files]
            self._pieces[file.rank] = {(names[p.file], p.start, p.nbytes): p for p in receipt.pieces}
        try:
            return self._pieces[file.rank][file.name, start, nbytes].blocks()
        except KeyError:
            raise ManifestError(
                f"the receipt of rank {file.rank} has no digests for {file.name} at {start}, where the manifest has a "
                "chunk: load an earlier checkpoint"
            ) from None


class _NoStager(Stager):
    """Plain memory, for the few bytes that are read outside a plan."""

    def buffer(self, nbytes: int) -> ByteBuffer:
        return np.empty(nbytes, np.uint8)

    def release(self, buffer: ByteBuffer) -> None:
        return None

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        raise NotImplementedError

    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        raise NotImplementedError


def read_receipt(store: ByteStore, manifest: Manifest, rank: int, listed: Mapping[str, FileRecord]) -> Receipt:
    """A rank's receipt, checked against the manifest and its files by name.

    Raises:
        MissingFileError: it is not there.
        ManifestError: it is damaged, hostile, or speaks of other things than the manifest does.
    """
    name = receipt_name(rank, manifest.save_id)
    what = f"{store.url}/{name}"
    info = store.stat(name)
    if info is not None and info.size > MAX_RECEIPT_BYTES:
        raise ManifestError(f"{what} has {info.size} bytes, more than any receipt: load an earlier checkpoint")
    receipt = decode_receipt(store.read(name), manifest.receipts[rank], what)
    kind = (receipt.format, receipt.version, receipt.save_id, receipt.rank, receipt.world_size)
    fits = kind == (RECEIPT_FORMAT, manifest.version, manifest.save_id, rank, manifest.world_size)
    room = [file.size - file.data_start for file in receipt.files]
    inside = all(0 <= p.nbytes <= room[p.file] - p.start for p in receipt.pieces)
    if not fits or not inside or any(listed.get(file.name) != file for file in receipt.files):
        raise ManifestError(f"{what} does not say the same as the manifest: load an earlier checkpoint")
    return receipt


def check_file(store: ByteStore, record: FileRecord) -> None:
    """Checks one file against its record."""
    info = store.stat(record.name)
    if info is None:
        raise MissingFileError(f"{store.url}/{record.name} is missing: restore it, or load an earlier checkpoint")
    if info.size != record.size:
        raise FileSizeError(
            f"{store.url}/{record.name} has {info.size} bytes but was saved with {record.size}: it was cut or "
            "replaced. Restore it, or load an earlier checkpoint"
        )
    if record.data_start > MAX_HEADER_BYTES + 8:
        raise HeaderError(
            f"{store.url}/{record.name} is said to have a header of {record.data_start} bytes, more than any reader "
            "takes: load an earlier checkpoint"
        )
    header = bytearray(record.data_start)
    store.read_into(record.name, [(0, len(header))], [memoryview(header)])
    if header_digest(bytes(header)) != record.header_digest:
        raise HeaderError(
            f"{store.url}/{record.name} has another header than was saved: restore it, or load an earlier checkpoint"
        )


@dataclass(frozen=True, eq=False)
class LoadJob:
    """Everything that `Loader` needs of one rank.

    Args:
        columns: wanted boxes: those this rank reads and those it receives, in canonical order.
        located: stored pieces for the rows that this rank reads.
        targets: by tensor name, the shards that the boxes lie in.
        batch_ready: waits until all ranks of a group have read a batch.
        batch_bytes: the same on all ranks.
    """

    ranks: Ranks
    stager: Stager
    stored: Stored
    store: ByteStore
    columns: Columns
    located: Located
    targets: dict[str, list[Target]]
    batch_ready: Callable[[str, Sequence[int]], None]
    batch_bytes: int
    threads: int
    max_host_bytes: int | None


@dataclass
class LoadCounts:
    """What a load moved, in bytes: `read` from the store, `received` from ranks, and the most host memory held."""

    read: int = 0
    received: int = 0
    peak_host_bytes: int = 0


class Loader:
    """Runs one rank's load plan."""

    def __init__(self, job: LoadJob, default_host_bytes: int) -> None:
        self.job = job
        self.counts = LoadCounts()
        largest = max((t.nbytes for ts in job.targets.values() for t in ts if t.view is None), default=0)
        shared = bool((job.columns.group >= 0).any())
        scratch = SEGMENT_BYTES + 3 * BLOCK_BYTES
        need = 2 * largest + shared * 2 * job.batch_bytes + 3 * BLOCK_BYTES
        limit = max(default_host_bytes, need + scratch) if job.max_host_bytes is None else job.max_host_bytes
        self.budget = Budget(limit)
        self.budget.require(need, f"a load with shards of {largest} bytes outside host memory")
        self._scratch = min(scratch, limit - need + 3 * BLOCK_BYTES)
        self._staging_limit = max(limit - need - scratch + 2 * largest, largest)
        self._reader = PieceReader(job.store, job.stager, self.budget, self._scratch)
        order = np.argsort(job.located.want, kind="stable")
        self._handles: list[Any] = []
        self._located_order = order
        self._located_want = job.located.want[order]
        self._places: dict[int, tuple[Target, tuple[int, ...]]] = {}
        for row in range(len(job.columns)):
            self._target(row)[0].remaining += 1

    def verify_first(self) -> None:
        """Checks every block that will be read, before any target is touched."""
        located, reader = self.job.located, dataclasses.replace(self._reader, fills=False)
        tasks: list[Task] = []
        for i in range(len(located)):
            piece, shape, offsets, sizes, itemsize = self._piece(i)
            tasks += reader.verify_tasks(piece, shape, offsets, sizes, itemsize)
        run_all(tasks, self.job.threads)

    def open_groups(self) -> None:
        """Makes the groups of ranks that share reads. Collective: before `run`, so that no rank waits in it for
        another one that reads, or has failed to."""
        if self.job.columns.groups:
            self._handles = self.job.ranks.groups(self.job.columns.groups)

    def run(self) -> None:
        """Fills every target."""
        alone = np.flatnonzero(self.job.columns.group < 0)
        for rows in self._staging_batches(alone):
            self._open(rows)
            run_all([t for r in rows for t in self.read_tasks(r, self.destination(r))], self.job.threads)
            self._close(rows)
        self._run_shared()
        self.counts.peak_host_bytes = self.budget.peak

    def _run_shared(self) -> None:
        columns = self.job.columns
        present = np.unique(columns.group[columns.group >= 0]).tolist()
        for number in present:
            rows = np.flatnonzero(columns.group == number)
            group = columns.groups[number]
            for batch, members in enumerate(_batches(columns, rows, self.job.batch_bytes)):
                self._open(members)
                parts = [_Shared(self, reader, members) for reader in group]
                run_all([t for p in parts if p.reader == self.job.ranks.rank for t in p.tasks()], self.job.threads)
                # A rank enters the broadcasts only when every rank of the group has read its part.
                self.job.batch_ready(f"{number}/{batch}", group)
                for part in parts:
                    part.exchange(self._handles[number])
                self._close(members)

    def _staging_batches(self, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Iterator[list[int]]:
        """Rows in batches whose staged shards fit the budget; rows into host memory are all in the first."""
        direct = [r for r in rows.tolist() if not self._target(r)[0].staged]
        if direct:
            yield direct
        batch: list[int] = []
        open_targets: set[int] = set()
        held = 0
        for row in (r for r in rows.tolist() if self._target(r)[0].staged):
            target = self._target(row)[0]
            new = id(target) not in open_targets
            if new and batch and held + target.nbytes > self._staging_limit:
                yield batch
                batch, open_targets, held = [], set(), 0
            held += target.nbytes if new else 0
            open_targets.add(id(target))
            batch.append(row)
        if batch:
            yield batch

    def _open(self, rows: Sequence[int]) -> None:
        for row in rows:
            target, _ = self._target(row)
            if target.view is None:
                self.budget.acquire(target.nbytes)
                target.staging = self.job.stager.buffer(target.nbytes)
                flat = target.staging[: target.nbytes].view(dtype_of(target.dtype).carrier)
                target.view = flat.reshape(target.shard.sizes)

    def _close(self, rows: Sequence[int]) -> None:
        """Copies in the shards of which every box has been filled."""
        done: list[tuple[Target, Pending]] = []
        for row in rows:
            target, _ = self._target(row)
            target.remaining -= 1
            if target.remaining == 0 and target.staging is not None:
                done.append((target, self.job.stager.copy_in(target.staging, target.shard)))
        for target, pending in done:
            pending.wait()
            assert target.staging is not None
            self.job.stager.release(target.staging)
            self.budget.release(target.nbytes)
            target.view, target.staging = None, None

    def _target(self, row: int) -> tuple[Target, tuple[int, ...]]:
        """The shard that a wanted box lies in, and the box's offsets inside it."""
        if row not in self._places:
            self._places[row] = self._find(row)
        return self._places[row]

    def _find(self, row: int) -> tuple[Target, tuple[int, ...]]:
        offsets, sizes = self.job.columns.box(row)
        name = self.job.columns.table.names[int(self.job.columns.tensor[row])]
        for target in self.job.targets[name]:
            low = tuple(o - s for o, s in zip(offsets, target.shard.offsets, strict=True))
            if all(a >= 0 and a + n <= m for a, n, m in zip(low, sizes, target.shard.sizes, strict=True)):
                return target, low
        raise PlanError(f"the plan wants {name!r} at {offsets}, which this rank does not hold")

    def destination(self, row: int) -> Carrier:
        """The memory of a wanted box."""
        target, low = self._target(row)
        _, sizes = self.job.columns.box(row)
        assert target.view is not None
        return cut(target.view, low, sizes)

    def _piece(self, i: int) -> tuple[Piece, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        located, columns = self.job.located, self.job.columns
        number = int(columns.tensor[located.want[i]])
        d = len(columns.table.shapes[number])
        shape = tuple(located.piece_sizes[i, :d].tolist())
        offsets = tuple((located.offsets[i, :d] - located.piece_offsets[i, :d]).tolist())
        sizes = tuple(located.sizes[i, :d].tolist())
        itemsize = columns.table.dtype(number).itemsize
        nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
        piece = self.job.stored.piece(columns.table.names[number], int(located.file[i]), int(located.start[i]), nbytes)
        return piece, shape, offsets, sizes, itemsize

    def read_tasks(self, row: int, destination: Carrier) -> Iterator[Task]:
        """Tasks that fill a wanted box from the stored pieces."""
        low, high = np.searchsorted(self._located_want, [row, row + 1])
        base = self.job.columns.box(row)[0]
        for i in self._located_order[low:high].tolist():
            piece, shape, offsets, sizes, itemsize = self._piece(i)
            at = self.job.located.offsets[i, : len(base)].tolist()
            part = cut(destination, [a - b for a, b in zip(at, base, strict=True)], sizes)
            self.counts.read += int(np.prod(sizes, dtype=np.int64)) * itemsize
            yield from self._reader.tasks(piece, shape, offsets, sizes, part)


def _batches(columns: Columns, rows: np.ndarray[tuple[int], np.dtype[np.intp]], limit: int) -> Iterator[list[int]]:
    """Consecutive rows of about `limit` bytes; the same on every rank of the group."""
    number = np.cumsum(columns.nbytes()[rows]) // limit
    for part in np.split(rows, np.flatnonzero(np.diff(number)) + 1):
        yield part.tolist()


@dataclass(eq=False)
class _Message:
    """One buffer to pass on, and the boxes in it: row, where it belongs, where it lies in the buffer."""

    buffer: ByteBuffer
    boxes: list[tuple[int, Carrier, Carrier]]
    pooled: ByteBuffer | None = None


class _Shared:
    """What one rank of a group reads of a batch and passes on: large boxes as they lie, small ones packed.

    Which boxes travel together follows from the plan alone: all ranks of the group must agree on it.
    """

    def __init__(self, loader: Loader, reader: int, members: list[int]) -> None:
        self.reader, self._loader = reader, loader
        columns = loader.job.columns
        rows = [r for r in members if int(columns.rank[r]) == reader]
        sizes = columns.nbytes()
        large = [r for r in rows if sizes[r] >= PACK_BYTES]
        small = [r for r in rows if sizes[r] < PACK_BYTES]
        self._messages = [self._message([r], int(sizes[r])) for r in large]
        if small:
            self._messages.append(self._message(small, int(sizes[small].sum())))

    def _message(self, rows: list[int], nbytes: int) -> _Message:
        if len(rows) == 1:
            destination = self._loader.destination(rows[0])
            if destination.flags.c_contiguous:
                return _Message(destination.reshape(-1).view(np.uint8), [(rows[0], destination, destination)])
        self._loader.budget.acquire(nbytes)
        pooled = self._loader.job.stager.buffer(nbytes)
        message, at = _Message(pooled[:nbytes], [], pooled), 0
        for row in rows:
            destination = self._loader.destination(row)
            n = destination.size * destination.itemsize
            view = message.buffer[at : at + n].view(destination.dtype).reshape(destination.shape)
            message.boxes.append((row, destination, view))
            at += n
        return message

    def tasks(self) -> Iterator[Task]:
        """Reads this part into its messages."""
        for message in self._messages:
            for row, _, view in message.boxes:
                yield from self._loader.read_tasks(row, view)

    def exchange(self, group: object) -> None:
        """Sends or receives this part, then unpacks it."""
        ranks = self._loader.job.ranks
        buffers = [m.buffer for m in self._messages]
        if buffers:
            ranks.broadcast_into(buffers, self.reader, group).wait()
        if self.reader != ranks.rank:
            self._loader.counts.received += sum(len(b) for b in buffers)
        for message in self._messages:
            if message.pooled is not None:
                for _, destination, view in message.boxes:
                    destination[...] = view
                self._loader.job.stager.release(message.pooled)
                self._loader.budget.release(len(message.buffer))
