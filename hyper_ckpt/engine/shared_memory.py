"""Host memory that another process can see: anonymous files, mapped by both, pooled like any buffer."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import threading
import weakref
from dataclasses import dataclass

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, Carrier
from hyper_ckpt.errors import StoreError


@dataclass(frozen=True)
class SharedFile:
    """An anonymous file: a number that is never used again, its descriptor here, its bytes."""

    number: int
    fd: int
    nbytes: int


class SharedBuffers:
    """Makes buffers in anonymous files, which go when their buffers go.

    Not in /dev/shm, which is small in many containers, and would keep what a killed process left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._files: dict[int, SharedFile] = {}  # by address
        self._gone: list[int] = []

    def allocate(self, nbytes: int) -> ByteBuffer:
        """A buffer of `nbytes`, filled with zeros.

        Raises:
            StoreError: the system refuses it.
        """
        try:
            fd, buffer = _map_new_file(nbytes)
        except OSError as error:
            raise StoreError(
                f"making a shared copy of {nbytes:,} bytes failed: {error}. Raise this process's limit (ulimit -f, "
                '-n, -v) or free some memory; or save with executor="thread"'
            ) from error
        with self._lock:
            self._files[_address(buffer)] = SharedFile(next(self._numbers), fd, nbytes)
        weakref.finalize(buffer, self._forget, _address(buffer))
        return buffer

    def place(self, view: Carrier) -> tuple[SharedFile, int]:
        """The file that a view lies in, and the bytes before it.

        Raises:
            KeyError: it lies in none.
        """
        at = _address(view)
        with self._lock:
            for start, file in self._files.items():
                if start <= at and at + view.nbytes <= start + file.nbytes:
                    return file, at - start
        raise KeyError(at)

    def take_gone(self) -> list[int]:
        """Numbers of files that have gone since this was last asked."""
        with self._lock:
            gone, self._gone = self._gone, []
        return gone

    def _forget(self, address: int) -> None:
        with self._lock:
            file = self._files.pop(address)
            self._gone.append(file.number)
        os.close(file.fd)


def _map_new_file(nbytes: int) -> tuple[int, ByteBuffer]:
    """The descriptor of a new anonymous file, and all of it."""
    fd = _anonymous_file()
    try:
        os.ftruncate(fd, nbytes)
        return fd, np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    except BaseException:
        os.close(fd)
        raise


def map_file(fd: int) -> ByteBuffer:
    """All of an anonymous file that another process made."""
    mapped: ByteBuffer = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
    return mapped


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hyper-ckpt", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix="hyper-ckpt-")
    os.unlink(path)
    return fd


def _address(buffer: Carrier) -> int:
    return int(buffer.__array_interface__["data"][0])
