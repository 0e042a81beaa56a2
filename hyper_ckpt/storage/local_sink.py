"""A file being written at known offsets by several threads."""

from __future__ import annotations

import contextlib
import os
import threading

from hyper_ckpt.contracts.store import Bytes, Sink
from hyper_ckpt.errors import StoreError
from hyper_ckpt.storage import syscalls
from hyper_ckpt.storage.buffers import as_bytes


class LocalSink(Sink):
    """Owns an open file of `size` bytes. It can be seen under its name while it is written.

    Args:
        path: where the file is.
        fd: a descriptor open for writing, closed by `close` or `abort`.
        size: bytes of the whole file.
    """

    def __init__(self, path: str, fd: int, size: int) -> None:
        self._path = path
        self._fd = fd
        self._size = size
        self._lock = threading.Lock()
        self._writers = 0
        self._closed = False
        self._aborted = False

    def write_at(self, offset: int, data: Bytes) -> None:
        view = as_bytes(data)
        if offset < 0 or offset + view.nbytes > self._size:
            raise StoreError(f"{view.nbytes} bytes at {offset} do not fit {self._path}, made for {self._size} bytes")
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._path} is closed: nothing more can be written to it")
            self._writers += 1
        try:
            with syscalls.naming("writing", self._path, f" ({view.nbytes:,} bytes at {offset:,})"):
                syscalls.write_all(self._fd, offset, view)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._writers -= 1
            last = self._closed and not self._writers
        if last:
            with contextlib.suppress(OSError):
                os.close(self._fd)

    def close(self, *, sync: bool) -> None:
        with self._lock:
            if self._closed or self._writers:
                raise StoreError(f"{self._path} can't be closed: {'it is already' if self._closed else 'it is in use'}")
            self._closed = True
        with syscalls.naming("completing", self._path):
            try:
                if sync:
                    syscalls.sync_file(self._fd)
            finally:
                os.close(self._fd)

    def abort(self) -> None:
        with self._lock:
            again, self._aborted = self._aborted, True
            # Threads may still be writing. The number of a descriptor closed under them can be another
            # file's a moment later, so the last of them closes it.
            ours = not self._closed and not self._writers
            self._closed = True
        if ours:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        if not again:
            syscalls.unlink_quietly(self._path)

    def __del__(self) -> None:
        if not self._closed:  # neither closed nor aborted: the file stays as it is, the descriptor must not
            with contextlib.suppress(OSError):
                os.close(self._fd)
