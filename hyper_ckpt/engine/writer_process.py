"""A process that writes for this one: for training loops that keep the interpreter busy.

It is started by `python -m hyper_ckpt.engine.writer_main`, never forked, stays until its parent ends, and sees the
copies of the state in shared memory. It knows no framework.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

from hyper_ckpt.box import cut
from hyper_ckpt.contracts.placement import FilePlan
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.engine.save import SaveJob, Source, WritePiece, WriteResult
from hyper_ckpt.engine.shared_memory import SharedBuffers, SharedFile
from hyper_ckpt.errors import StoreError
from hyper_ckpt.receipt import LocalPart


@dataclass(frozen=True)
class RemotePiece:
    """A piece whose elements lie in a shared file: carriers of `dtype`, from `offset` on, with strides in bytes."""

    name: str
    file: int
    start: int
    nbytes: int
    number: int
    offset: int
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class RemoteJob:
    """A `SaveJob` that can be sent. Pieces of bytes go along; `gone` are numbers of files to be unmapped."""

    store: ByteStore
    plans: tuple[FilePlan, ...]
    pieces: tuple[RemotePiece | WritePiece, ...]
    save_id: str
    rank: int
    world_size: int
    threads: int
    durable: bool
    description: LocalPart | None
    gone: tuple[int, ...]


class WriterProcess:
    """Writes by another process, one job after another. Started when first needed, and again if it has died.

    Args:
        shared: where the buffers of all jobs come from.
    """

    def __init__(self, shared: SharedBuffers) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None
        self._known: set[int] = set()

    def write(self, job: SaveJob) -> WriteResult:
        """As `engine.save.write`.

        Raises:
            StoreError: the process died.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                return self._run(job)
            except (EOFError, OSError) as error:
                code = self._end()
                raise StoreError(
                    f"the process that writes to {job.store.url} died (exit code {code}): look at its output, and save "
                    "again"
                ) from error

    def _run(self, job: SaveJob) -> WriteResult:
        connection = self._connection
        assert connection is not None
        files: dict[int, SharedFile] = {}
        connection.send(self._as_remote(job, files))
        new = [file for number, file in sorted(files.items()) if number not in self._known]
        connection.send([file.number for file in new])
        assert self._socket is not None
        for file in new:
            socket.send_fds(self._socket, [b"f"], [file.fd])
            self._known.add(file.number)
        while True:
            kind, value = connection.recv()
            if kind == "progress":
                job.progress(value)
            elif kind == "error":
                raise value
            else:
                result: WriteResult = value
                return result

    def _as_remote(self, job: SaveJob, files: dict[int, SharedFile]) -> RemoteJob:
        pieces: list[RemotePiece | WritePiece] = []
        for piece in job.pieces:
            if not isinstance(piece.source, Source) or not piece.nbytes:
                source = piece.source if isinstance(piece.source, bytes) else b""
                pieces.append(WritePiece(piece.name, piece.file, piece.start, piece.nbytes, source))
                continue
            pieces.append(self._place(piece, piece.source, files))
        gone = self._shared.take_gone()
        self._known -= set(gone)
        return RemoteJob(
            job.store, tuple(job.plans), tuple(pieces), job.save_id, job.rank, job.world_size, job.threads,
            job.durable, job.description, tuple(gone),
        )  # fmt: skip

    def _place(self, piece: WritePiece, source: Source, files: dict[int, SharedFile]) -> RemotePiece:
        assert source.view is not None
        view = cut(source.view, source.offsets, source.sizes)
        file, offset = self._shared.place(view)
        files[file.number] = file
        return RemotePiece(
            piece.name,
            piece.file,
            piece.start,
            piece.nbytes,
            file.number,
            offset,
            source.dtype,
            view.shape,
            view.strides,
        )

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        talk, theirs_too = socket.socketpair()
        with theirs, theirs_too:
            fds = (theirs.fileno(), theirs_too.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hyper_ckpt.engine.writer_main", *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
        self._socket, self._connection, self._known = ours, Connection(talk.detach()), set()

    def _end(self) -> int | None:
        """Closes what is left of a process. Returns its exit code, None if there was none."""
        if self._process is None:
            return None
        for each in (self._connection, self._socket):
            if each is not None:
                each.close()
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._process = self._connection = self._socket = None
        return code

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        return None if self._process is None else self._process.pid
