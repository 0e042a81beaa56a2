"""Copies a checkpoint from any store to any other, checking every block on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hyper_ckpt.contracts.store import ByteStore, Expect, Sink
from hyper_ckpt.engine.commit import look
from hyper_ckpt.engine.digest import block_digest
from hyper_ckpt.engine.save import discard
from hyper_ckpt.engine.stored import check_file, read_receipt
from hyper_ckpt.engine.visible import Expected, require_visible
from hyper_ckpt.engine.workers import Task, default_threads, run_all
from hyper_ckpt.errors import CheckpointError, CheckpointExistsError, DigestError, ManifestError
from hyper_ckpt.manager.listing import entry_at, is_part
from hyper_ckpt.manager.note import MAX_NOTE_BYTES, NOTE_NAME
from hyper_ckpt.manifest import MANIFEST_NAME, Manifest
from hyper_ckpt.receipt import BLOCK_BYTES, FileRecord, Receipt, decode_receipt, receipt_name
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.filesystem import FileSystemReader
from hyper_ckpt.storage.whole import read_record, read_whole

Progress = Callable[[int, int], None]


def copy_checkpoint(source: str, target: str, *, threads: int | None = None, progress: Progress | None = None) -> int:
    """Copies a checkpoint; its manifest comes last, so that the copy is complete or none.

    A checkpoint of ranks that did not talk gets the manifest that it went without.

    Args:
        source: path or URL.
        target: path or URL at which nothing of a checkpoint is.
        threads: threads that copy; None: one per processor, 2 to 8.
        progress: told of the bytes copied so far and of all there are; from any thread.

    Returns:
        Bytes of data files that were copied.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `source`.
        CheckpointExistsError: something is at `target`.
        CorruptCheckpointError: the source is damaged; names the file and the bytes.
        StoreError: reading or writing failed; names the file. In both cases nothing is left at `target`.
    """
    read, write = registry().store(source), registry().store(target)
    manifest = FileSystemReader().load_metadata(read)
    if not manifest.receipts:
        raise CheckpointError(f"{manifest.checkpoint} has no digests to check the copy by: copy its files as they are")
    _refuse_what_is_there(write)
    return _Copying(read, write, manifest, progress).run(threads or default_threads())


def _refuse_what_is_there(write: ByteStore) -> None:
    """Only to where nothing of a checkpoint is."""
    try:
        look(write, overwrite=False)
    except CheckpointExistsError as error:
        if entry_at(write).state != "incomplete":
            raise CheckpointExistsError(
                f"{write.url} holds a checkpoint already: copy to another path, or remove it first with "
                f"hyper-ckpt rm {write.url}"
            ) from error
    if any(map(is_part, write.list())):
        raise CheckpointExistsError(
            f"{write.url} holds files of a save or copy that did not finish: copy to another path, or remove them with "
            f"hyper-ckpt rm --force {write.url}"
        )


class _Copying:
    """One copy."""

    def __init__(self, read: ByteStore, write: ByteStore, manifest: Manifest, progress: Progress | None) -> None:
        self._read, self._write, self._manifest, self._progress = read, write, manifest, progress
        self._total = sum(f.size for f in manifest.files)
        self._copied = 0
        self._lock = threading.Lock()
        self._sinks: dict[str, Sink] = {}
        self._made: dict[str, int] = {}

    def run(self, threads: int) -> int:
        """Copies all of it, or removes what was copied."""
        missing = self._write.missing_folders()
        try:
            receipts = self._receipts()
            for record in self._manifest.files:
                check_file(self._read, record)
            for record in self._manifest.files:
                self._sinks[record.name] = self._write.create(record.name, record.size)
            with self._read.reading():
                run_all(self._tasks(receipts), threads)
            for sink in self._sinks.values():
                sink.close(sync=True)
            self._copy_small()
            require_visible(self._write, self._expected(), 0.0, threads)
            self._write.publish(MANIFEST_NAME, self._manifest.data, Expect.ABSENT, sync=True)
        except BaseException:
            for sink in self._sinks.values():
                sink.abort()
            discard(self._write, [*self._made])
            self._write.remove_folders(missing)
            raise
        return self._total

    def _expected(self) -> list[Expected]:
        files = [Expected(f.name, f.size, 0) for f in self._manifest.files]
        return files + [Expected(name, size, 0) for name, size in self._made.items()]

    def _receipts(self) -> list[Receipt]:
        """All receipts, whose pieces make up all bytes of the files."""
        listed = {file.name: file for file in self._manifest.files}
        receipts = [read_receipt(self._read, self._manifest, r, listed) for r in range(self._manifest.world_size)]
        room = {f.name: f.size - f.data_start for f in self._manifest.files}
        for receipt in receipts:
            for piece in receipt.pieces:
                room[receipt.files[piece.file].name] -= piece.nbytes
        for name, left in room.items():
            if left:
                raise ManifestError(f"{self._read.url}/{name}: {left} bytes have no digest: load an earlier checkpoint")
        return receipts

    def _tasks(self, receipts: list[Receipt]) -> list[Task]:
        tasks: list[Task] = []
        for record in self._manifest.files:
            tasks.append(lambda f=record: self._copy(f, 0, f.data_start, None))  # type: ignore[misc]
        for receipt in receipts:
            for piece in receipt.pieces:
                file = receipt.files[piece.file]
                for i, digest in enumerate(piece.blocks().tolist()):
                    low = file.data_start + piece.start + i * BLOCK_BYTES
                    high = min(low + BLOCK_BYTES, file.data_start + piece.start + piece.nbytes)
                    tasks.append(lambda f=file, a=low, b=high, d=digest: self._copy(f, a, b, d))  # type: ignore[misc]
        return tasks

    def _copy(self, file: FileRecord, low: int, high: int, digest: int | None) -> None:
        """Copies a block; the header, which has no block digest, was checked by its own."""
        data = memoryview(bytearray(high - low))
        self._read.read_into(file.name, [(low, high - low)], [data])
        if digest is not None and block_digest(data) != digest:
            raise DigestError(
                f"{self._read.url}/{file.name}: bytes {low:,} to {high:,} differ from what was saved. Copy another "
                "checkpoint; hyper-ckpt verify lists all that is damaged"
            )
        self._sinks[file.name].write_at(low, data)
        with self._lock:
            self._copied += high - low
            if self._progress is not None:
                self._progress(self._copied, self._total)

    def _copy_small(self) -> None:
        """The receipts, whose digests the manifest has, and the note of a run."""
        for rank, digest in enumerate(self._manifest.receipts):
            name = receipt_name(rank, self._manifest.save_id)
            data = read_record(self._read, name)
            decode_receipt(data, digest, f"{self._read.url}/{name}")  # it is the one that was read first
            self._publish(name, data)
        if self._read.stat(NOTE_NAME) is not None:
            self._publish(NOTE_NAME, read_whole(self._read, NOTE_NAME, MAX_NOTE_BYTES))

    def _publish(self, name: str, data: bytes) -> None:
        self._made[name] = len(data)
        self._write.publish(name, data, Expect.ANY, sync=True)
