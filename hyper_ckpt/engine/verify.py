"""Checks everything that a checkpoint stores."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from hyper_ckpt.box import IntArray
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.engine.digest import block_digest
from hyper_ckpt.engine.stored import check_file, read_receipt
from hyper_ckpt.engine.workers import Task, run_all
from hyper_ckpt.errors import CheckpointError
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.receipt import BLOCK_BYTES, Receipt, receipt_name
from hyper_ckpt.storage.filesystem import is_whole

T = TypeVar("T")

_MOST_CHUNKS = 10**8
"""Chunks that are looked through for the names of damaged ones: a hostile manifest may have any number."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: in which file, which tensor or value (or ""), which bytes of the file, and what."""

    file: str
    name: str
    start: int
    stop: int
    what: str


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`: bytes checked, and every problem found."""

    bytes_checked: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


class Verifier:
    """Checks receipts, headers, every block of every piece, and that every tensor is stored whole.

    Args:
        store: where the checkpoint lies.
        manifest: its manifest.
        threads: threads that read.
        progress: told of the bytes checked so far and of all there are; from any thread.
    """

    def __init__(
        self, store: ByteStore, manifest: Manifest, threads: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._store, self._manifest, self._threads, self._progress = store, manifest, threads, progress
        self._total = sum(f.size - f.data_start for f in manifest.files)
        self._lock = threading.Lock()
        self._problems: list[Problem] = []
        self._checked = 0
        self._pieces: dict[int, tuple[str, int]] = {}  # file and start of the piece that a problem is in, by its number

    def run(self) -> VerifyReport:
        """Checks everything; a problem does not end it."""
        self._check_tensors()
        for record in self._manifest.files:
            self._attempt(record.name, lambda record=record: check_file(self._store, record))  # type: ignore[misc]
        covered: dict[str, int] = {}
        listed = {file.name: file for file in self._manifest.files}
        for rank in range(self._manifest.world_size):
            name = receipt_name(rank, self._manifest.save_id)
            receipt = self._attempt(name, lambda r=rank: read_receipt(self._store, self._manifest, r, listed))  # type: ignore[misc]
            if receipt is not None:
                self._check_pieces(receipt, covered)
        for record in self._manifest.files:
            if covered.get(record.name, 0) != record.size - record.data_start:
                text = f"{covered.get(record.name, 0)} of {record.size - record.data_start} bytes have digests"
                self._problems.append(Problem(record.name, "", record.data_start, record.size, text))
        return VerifyReport(self._checked, tuple(self._named()))

    def _check_tensors(self) -> None:
        """Proves that every tensor is covered by its chunks."""
        for name in self._manifest.tensors:
            stored = self._attempt("manifest.json", lambda name=name: self._manifest.tensor(name))  # type: ignore[misc]
            if stored is not None and not is_whole(stored):
                self._problems.append(Problem("manifest.json", name, 0, 0, "its chunks do not cover it exactly once"))

    def _check_pieces(self, receipt: Receipt, covered: dict[str, int]) -> None:
        payload_of = {number: name for name, number in receipt.payloads.items()}
        tasks: list[Task] = []
        # Files of other sizes are reported already.
        ends = {f.name: info.size if (info := self._store.stat(f.name)) else 0 for f in receipt.files}
        for number, piece in enumerate(receipt.pieces):
            file = receipt.files[piece.file]
            covered[file.name] = covered.get(file.name, 0) + piece.nbytes
            name, place = payload_of.get(number, ""), (file.name, piece.start)
            start, stop = file.data_start + piece.start, file.data_start + piece.start + piece.nbytes
            if 0 < ends[file.name] < stop:
                at = max(start, ends[file.name])
                self._note(place, Problem(file.name, name, at, stop, "these bytes are gone: the file ends early"))
            for low, digest in zip(range(start, stop, BLOCK_BYTES), piece.blocks().tolist(), strict=True):
                high = min(low + BLOCK_BYTES, stop)
                if high > ends[file.name]:
                    break
                tasks.append(lambda p=place, n=name, a=low, b=high, d=digest: self._check_block(p, n, a, b, d))  # type: ignore[misc]
        with self._store.reading():
            run_all(tasks, self._threads)

    def _check_block(self, piece: tuple[str, int], name: str, low: int, high: int, digest: int) -> None:
        buffer, file = np.empty(high - low, np.uint8), piece[0]
        try:
            self._store.read_into(file, [(low, high - low)], [buffer.data])
        except CheckpointError as error:
            self._note(piece, Problem(file, name, low, high, str(error)))
            return
        with self._lock:
            self._checked += high - low
            if self._progress is not None:
                self._progress(self._checked, self._total)
        if block_digest(buffer.data) != digest:
            self._note(piece, Problem(file, name, low, high, "the bytes differ from what was saved"))

    def _note(self, piece: tuple[str, int], problem: Problem) -> None:
        with self._lock:
            self._pieces[len(self._problems)] = piece
            self._problems.append(problem)

    def _named(self) -> list[Problem]:
        """The problems, those of tensors with their names. They are looked for only where there are problems."""
        if not self._pieces:
            return self._problems
        number_of = {record.name: number for number, record in enumerate(self._manifest.files)}
        names = {(number_of[file], start): "" for file, start in self._pieces.values()}
        for name, file, start in self._chunks_at(np.array(sorted({start for _, start in names}), np.int64)):
            if (file, start) in names:
                names[file, start] = name
        whose = {number: names[number_of[file], start] for number, (file, start) in self._pieces.items()}
        return [replace(p, name=whose.get(number) or p.name) for number, p in enumerate(self._problems)]

    def _chunks_at(self, starts: IntArray) -> Iterator[tuple[str, int, int]]:
        """Tensor, file and start of the chunks that start so in their files."""
        seen = 0
        for name in self._manifest.tensors:
            try:
                copies = self._manifest.tensor(name).copies
            except CheckpointError:  # reported already
                continue
            for chunks in copies:
                seen += len(chunks)
                if seen > _MOST_CHUNKS:
                    return
                if isinstance(chunks.starts, int) and chunks.starts not in starts:
                    continue
                at = np.flatnonzero(np.isin(chunks.start, starts))
                yield from zip(itertools.repeat(name), chunks.file[at].tolist(), chunks.starts_of(at).tolist())

    def _attempt(self, file: str, check: Callable[[], T]) -> T | None:
        try:
            return check()
        except CheckpointError as error:
            self._problems.append(Problem(file, "", 0, 0, str(error)))
            return None
