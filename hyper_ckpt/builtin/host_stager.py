"""Staging for tensors in host memory, and the pool of buffers that platforms share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, Done, LocalShard, Pending, Stager, Tensors
from hyper_ckpt.errors import PlatformError
from hyper_ckpt.fork_safety import reset_in_children

_SMALLEST = 4096


def _allocate(nbytes: int) -> ByteBuffer:
    return np.empty(nbytes, np.uint8)


class BufferPool:
    """Buffers that are reused warm, by any thread.

    Sizes are rounded up to classes (at most an eighth larger), so that tensors of similar size share
    buffers. Idle buffers are kept as long as the pool as a whole stays under the most that was ever
    in use at once: memory doesn't grow with the number of different sizes.
    """

    def __init__(self, allocate: Callable[[int], ByteBuffer] = _allocate) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, list[ByteBuffer]] = OrderedDict()  # by size, least recently used first
        self._used: set[int] = set()
        self._used_bytes = self._idle_bytes = self._peak = 0
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes in use and idle."""
        return self._used_bytes + self._idle_bytes

    def take(self, nbytes: int) -> ByteBuffer:
        """A buffer of at least `nbytes`."""
        size = _size_class(nbytes)
        with self._lock:
            buffer = self._reuse(size)
            self._used_bytes += size
            self._peak = max(self._peak, self._used_bytes)
            self._shrink()
        if buffer is None:
            try:
                buffer = self._allocate(size)
            except BaseException:
                with self._lock:
                    self._used_bytes -= size
                raise
        with self._lock:
            self._used.add(_address(buffer))
        return buffer

    def give(self, buffer: ByteBuffer) -> None:
        """Takes a buffer back.

        Raises:
            PlatformError: it isn't one that is out: given back twice, or a slice of one.
        """
        address = _address(buffer)
        with self._lock:
            if address not in self._used or _size_class(buffer.nbytes) != buffer.nbytes:
                raise PlatformError("this buffer is not in use: release exactly what `buffer` returned, once")
            self._used.remove(address)
            self._used_bytes -= buffer.nbytes
            self._idle.setdefault(buffer.nbytes, []).append(buffer)
            self._idle.move_to_end(buffer.nbytes)
            self._idle_bytes += buffer.nbytes
            self._shrink()

    def _reuse(self, size: int) -> ByteBuffer | None:
        return self._pop(size) if size in self._idle else None

    def _shrink(self) -> None:
        while self._idle and self.held_bytes > self._peak:
            self._pop(next(iter(self._idle)))

    def _pop(self, size: int) -> ByteBuffer:
        buffers = self._idle[size]
        buffer = buffers.pop()
        if not buffers:
            del self._idle[size]
        self._idle_bytes -= size
        return buffer


def _size_class(nbytes: int) -> int:
    """`nbytes` rounded up to an eighth of its power of two."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


def _address(buffer: ByteBuffer) -> int:
    return int(buffer.__array_interface__["data"][0])


class HostStager(Stager):
    """Copies between host tensors and pooled buffers; every copy is complete when the call returns.

    All calls may come from any thread.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._pool = BufferPool()

    def buffer(self, nbytes: int) -> ByteBuffer:
        return self._pool.take(nbytes)

    def release(self, buffer: ByteBuffer) -> None:
        self._pool.give(buffer)

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        view = self._tensors.host_view(shard)
        if view is None:
            raise PlatformError("a host stager was given a tensor that is not in host memory")
        np.copyto(buffer[: view.nbytes].view(view.dtype).reshape(view.shape), view)
        return Done()

    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        view = self._tensors.writable(shard)
        if view is None:
            raise PlatformError("a host stager was given a tensor that is not in host memory")
        np.copyto(view, buffer[: view.nbytes].view(view.dtype).reshape(view.shape))
        return Done()
