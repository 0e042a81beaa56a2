"""A process that writes for this one: for training loops that keep the interpreter busy.

It is started by `python -m hyper_ckpt.engine.writer_main`, never forked, stays until its parent ends, and sees the
copies of the state in shared memory. It knows no framework.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import weakref
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
        self._child: _Child | None = None

    def write(self, job: SaveJob) -> WriteResult:
        """As `engine.save.write`.

        Raises:
            StoreError: the process died.
        """
        with self._lock:
            try:
                try:
                    return self._run(job, self._living())
                except _NeverBegunError:  # the process died before it read the job: another one can take it
                    self._end()
                    return self._run(job, self._living())
            except _RaisedThereError as error:
                raise error.error from None
            except (EOFError, OSError) as error:
                code = self._end()
                raise StoreError(
                    f"the process that writes to {job.store.url} died (exit code {code}): look at its output, and save "
                    "again"
                ) from error

    def _living(self) -> _Child:
        """The process; a new one if there is none, or it is known to have died."""
        if self._child is None or self._child.process.poll() is not None:
            self._end()
            self._child = _Child()
            weakref.finalize(self, self._child.close)
        return self._child

    def _run(self, job: SaveJob, child: _Child) -> WriteResult:
        files: dict[int, SharedFile] = {}
        remote = self._as_remote(job, child, files)
        new = [file for number, file in sorted(files.items()) if number not in child.known]
        try:
            child.connection.send(remote)
            child.connection.send([file.number for file in new])
            for file in new:
                socket.send_fds(child.descriptors, [b"f"], [file.fd])
                child.known.add(file.number)
            child.connection.recv()  # it has the job
        except (EOFError, OSError) as error:
            raise _NeverBegunError(*error.args) from error
        while True:
            kind, value = child.connection.recv()
            if kind == "progress":
                job.progress(value)
            elif kind == "error":
                raise _RaisedThereError(value)
            else:
                result: WriteResult = value
                return result

    def _as_remote(self, job: SaveJob, child: _Child, files: dict[int, SharedFile]) -> RemoteJob:
        pieces: list[RemotePiece | WritePiece] = []
        for piece in job.pieces:
            if not isinstance(piece.source, Source) or not piece.nbytes:
                source = piece.source if isinstance(piece.source, bytes) else b""
                pieces.append(WritePiece(piece.name, piece.file, piece.start, piece.nbytes, source))
                continue
            pieces.append(self._place(piece, piece.source, files))
        gone = self._shared.take_gone()
        child.known -= set(gone)
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

    def _end(self) -> int | None:
        """Ends what is left of a process. Returns its exit code, None if there was none."""
        child, self._child = self._child, None
        return None if child is None else child.close()

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return None if self._child is None else self._child.process.pid


class _NeverBegunError(EOFError):
    """The process has died, and has not begun the job."""


class _RaisedThereError(Exception):
    """What the job raised in the other process, which is well."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _Child:
    """The process, a connection for jobs and one for descriptors, and which files it has mapped."""

    def __init__(self) -> None:
        self.descriptors, theirs = socket.socketpair()
        talk, their_talk = socket.socketpair()
        with theirs, their_talk:
            fds = (theirs.fileno(), their_talk.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hyper_ckpt.engine.writer_main", *map(str, fds)],
                # It must find what we find: stores of plugins travel pickled.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
        self.connection = Connection(talk.detach())
        self.known: set[int] = set()

    def close(self) -> int:
        """Hangs up and waits for its end; may be called again. Returns the exit code."""
        self.connection.close()
        self.descriptors.close()
        try:
            return self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
