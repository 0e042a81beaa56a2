"""What the process of `WriterProcess` runs: jobs from its parent, until that hangs up."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, Carrier, LocalShard
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.engine.budget import Budget
from hyper_ckpt.engine.plain_stager import PlainStager
from hyper_ckpt.engine.save import SaveJob, Source, WritePiece, write
from hyper_ckpt.engine.shared_memory import map_file
from hyper_ckpt.engine.writer_process import RemoteJob, RemotePiece
from hyper_ckpt.errors import StoreError


class Worker:
    """One end of a `WriterProcess`.

    Args:
        files: brings descriptors of shared files.
        connection: brings jobs, and takes progress and results.
    """

    def __init__(self, files: socket.socket, connection: Connection) -> None:
        self._files, self._connection = files, connection
        self._lock = threading.Lock()
        self._mapped: dict[int, ByteBuffer] = {}

    def serve(self) -> None:
        """Runs jobs until the parent hangs up."""
        while True:
            try:
                job: RemoteJob = self._connection.recv()
                new: list[int] = self._connection.recv()
            except EOFError:
                return
            for number in job.gone:
                self._mapped.pop(number, None)
            for number in new:
                _, fds, _, _ = socket.recv_fds(self._files, 1, 1)
                self._mapped[number] = map_file(fds[0])
                os.close(fds[0])
            self._send("begun", None)
            self._reply(job)

    def _reply(self, job: RemoteJob) -> None:
        try:
            self._send("result", write(self._local(job)))
        except BaseException as error:
            self._send("error", _sendable(error))

    def _send(self, kind: str, value: object) -> None:
        with self._lock:
            self._connection.send((kind, value))

    def _local(self, job: RemoteJob) -> SaveJob:
        return SaveJob(
            job.store,
            PlainStager(),
            job.plans,
            [self._piece(p) if isinstance(p, RemotePiece) else p for p in job.pieces],
            job.save_id,
            job.rank,
            job.world_size,
            job.threads,
            Budget(1 << 62),
            job.durable,
            lambda nbytes: self._send("progress", nbytes),
            job.description,
        )

    def _piece(self, piece: RemotePiece) -> WritePiece:
        carrier, file = dtype_of(piece.dtype).carrier, self._mapped[piece.number]
        view: Carrier = np.ndarray(piece.sizes, carrier, file, piece.offset, piece.strides)
        none = (0,) * len(piece.sizes)
        source = Source(LocalShard(none, piece.sizes, None), piece.dtype, view, none, piece.sizes)
        return WritePiece(piece.name, piece.file, piece.start, piece.nbytes, source)


def _sendable(error: BaseException) -> BaseException:
    """The error, or one of ours that says the same, if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return StoreError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Ends when the parent does: it alone decides when, also where a signal is meant for all of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    files, talk = map(int, sys.argv[1:])
    with socket.socket(fileno=files) as descriptors, Connection(talk) as connection:
        Worker(descriptors, connection).serve()


if __name__ == "__main__":
    main()
