"""A simulated device, in place of a vendor's runtime: memory of its own, streams, asynchronous copies.

Everything on a stream runs as late as the rules allow: when the host waits for the stream or for an event, or when a
stream that was ordered behind it has to run. So whoever reads a copy too early reads old bytes, every time; and
freed memory is overwritten as soon as the rules allow. Real devices do either only now and then.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Operation = Callable[[], object]

POISON = 0xDB
"""What fresh and freed memory is filled with."""
_GRAIN = 256  # sizes of blocks are multiples of this many bytes
_LOCK = threading.RLock()


class DeviceError(RuntimeError):
    """An operation failed on the device; what came after it on its stream was not run."""


class Device:
    """One device. Each thread has a current stream on it, at first one of its own."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._current = threading.local()
        self._busy: dict[Stream, None] = {}  # streams with operations that have not run, by their newest one
        self._allocator = _Allocator()

    def __repr__(self) -> str:
        return f"sample:{self.index}"


@functools.cache
def device(index: int = 0) -> Device:
    """The device of this number."""
    return Device(index)


class Stream:
    """Operations that run one after the other. All methods may be called from any thread."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._queue: deque[Operation | Event] = deque()
        self._submitted = self._done = 0
        self._failure: BaseException | None = None

    def submit(self, operation: Operation) -> None:
        """Queues an operation."""
        self._append(operation)

    def wait_event(self, event: Event) -> None:
        """Orders all later operations behind an event."""
        self._append(event)

    def wait_stream(self, other: Stream) -> None:
        """Orders all later operations behind those that `other` has now."""
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        """An event that comes to pass when the operations queued so far have run."""
        with _LOCK:
            self.device._allocator.collect()
            return Event(self, self._submitted)

    def synchronize(self) -> None:
        """Waits on the host for all operations.

        Raises:
            DeviceError: one failed.
        """
        self.record_event().synchronize()

    def _append(self, item: Operation | Event) -> None:
        with _LOCK:
            self.device._allocator.collect()
            self._queue.append(item)
            self._submitted += 1
            self.device._busy.pop(self, None)
            self.device._busy[self] = None

    def _advance(self, position: int) -> None:
        """Runs operations until `position` of them are done. Never raises: failures are for who waits."""
        while self._done < position:
            item = self._queue.popleft()
            # An event that is waited for here was recorded before: streams cannot wait for each other in a ring.
            if isinstance(item, Event):
                item.stream._advance(item.position)
                self._failure = self._failure or item.stream._failure
            elif self._failure is None:
                try:
                    item()
                except BaseException as error:
                    self._failure = error
            self._done += 1
        if not self._queue:
            self.device._busy.pop(self, None)


@dataclass(frozen=True, eq=False)
class Event:
    """A point in a stream: the operations before `position`."""

    stream: Stream
    position: int

    def query(self) -> bool:
        """Whether it has come to pass. Makes nothing run."""
        with _LOCK:
            return self.stream._done >= self.position

    def synchronize(self) -> None:
        """Waits on the host, in any thread.

        Raises:
            DeviceError: an operation failed.
        """
        with _LOCK:
            self.stream.device._allocator.collect()
            self.stream._advance(self.position)
            if self.stream._failure is not None:
                raise DeviceError(f"an operation on {self.stream.device} failed") from self.stream._failure


def current_stream(device: Device) -> Stream:
    """The stream that this thread's work is queued on."""
    stream: Stream | None = getattr(device._current, "stream", None)
    if stream is None:
        stream = device._current.stream = Stream(device)
    return stream


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Makes `stream` this thread's current one for a while."""
    before = current_stream(stream.device)
    stream.device._current.stream = stream
    try:
        yield
    finally:
        stream.device._current.stream = before


def synchronize(device: Device) -> None:
    """Waits for all streams of a device, the one that was given work last first: what is not ordered comes wrong.

    Raises:
        DeviceError: an operation failed.
    """
    with _LOCK:
        for stream in reversed(list(device._busy)):
            stream.synchronize()


class Memory:
    """A block of device memory, freed with its last reference.

    It may then be given to others as soon as the stream on which it was allocated, and the streams named to
    `keep_for`, have run what they were given so far.

    Args:
        device: where it lies.
        nbytes: usable bytes.
        cells: the memory itself, which only operations on a stream may touch.
        owner: the stream that it was allocated on.
    """

    def __init__(self, device: Device, nbytes: int, cells: Bytes, owner: Stream) -> None:
        self.device, self.nbytes, self.cells = device, nbytes, cells
        self._owner = owner
        self._users: set[Stream] = set()

    def keep_for(self, stream: Stream) -> None:
        """Says that operations on another stream use the memory."""
        self._users.add(stream)

    def __del__(self) -> None:
        # May come at any point of any thread: it only leaves a note.
        self.device._allocator.dropped.append((self.cells, self._owner, self._users - {self._owner}))


class _Allocator:
    """Freed blocks by stream and size; the one freed last is given out first."""

    def __init__(self) -> None:
        self.dropped: deque[tuple[Bytes, Stream, set[Stream]]] = deque()
        self._free: dict[tuple[Stream, int], list[Bytes]] = {}
        self._in_use: list[tuple[Bytes, Stream, list[Event]]] = []  # dropped, but other streams are not done
        self._collecting = False

    def take(self, nbytes: int, owner: Stream) -> Bytes:
        """Memory of at least `nbytes` for work on `owner`."""
        size = max(-(-nbytes // _GRAIN), 1) * _GRAIN
        with _LOCK:
            self.collect()
            blocks = self._free.get((owner, size))
            return blocks.pop() if blocks else np.full(size, POISON, np.uint8)

    def collect(self) -> None:
        """Frees what was dropped."""
        if self._collecting:
            return
        self._collecting = True
        try:
            while self.dropped:
                cells, owner, users = self.dropped.popleft()
                self._in_use.append((cells, owner, [user.record_event() for user in users]))
            waiting = []
            for cells, owner, events in self._in_use:
                if all(event.query() for event in events):
                    self._reuse(cells, owner)
                else:
                    waiting.append((cells, owner, events))
            self._in_use = waiting
        finally:
            self._collecting = False

    def _reuse(self, cells: Bytes, owner: Stream) -> None:
        """Overwrites a block and gives it out. Its own stream hurries for that, other streams do not."""
        owner.submit(lambda: cells.fill(POISON))
        owner._advance(owner._submitted)
        self._free.setdefault((owner, len(cells)), []).append(cells)


def allocate(nbytes: int, device: Device) -> Memory:
    """Memory for work on this thread's current stream; what is in it is left over from others."""
    owner = current_stream(device)
    return Memory(device, nbytes, device._allocator.take(nbytes, owner), owner)


def pinned(nbytes: int) -> Bytes:
    """Host memory that a device copies to and from while the host goes on."""
    return np.empty(nbytes, np.uint8)


@dataclass(frozen=True, eq=False)
class Span:
    """Elements in device memory; offset and strides in bytes."""

    memory: Memory
    itemsize: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.itemsize

    def _cells(self) -> npt.NDArray[Any]:
        return np.ndarray(self.shape, f"V{self.itemsize}", self.memory.cells, self.offset, self.strides)

    def _host(self, host: Bytes) -> npt.NDArray[Any]:
        return host[: self.nbytes].view(f"V{self.itemsize}").reshape(self.shape)


# The copies below are queued on the current stream and return at once. Host memory is read and written when they
# run; they do not keep device memory from being freed.


def copy_to_host(source: Span, host: Bytes) -> None:
    """Copies elements, row-major, to the start of `host`."""
    target, cells = source._host(host), source._cells()
    current_stream(source.memory.device).submit(lambda: np.copyto(target, cells))


def copy_from_host(host: Bytes, target: Span) -> None:
    """Copies row-major elements from the start of `host`."""
    source, cells = target._host(host), target._cells()
    current_stream(target.memory.device).submit(lambda: np.copyto(cells, source))


def copy(source: Span, target: Span) -> None:
    """Copies elements of one shape and item size on the device."""
    from_cells, to_cells = source._cells(), target._cells()
    current_stream(target.memory.device).submit(lambda: np.copyto(to_cells, from_cells))


def fill(target: Span, element: bytes) -> None:
    """Sets every element."""
    cells, value = target._cells(), np.frombuffer(element, f"V{target.itemsize}")[0]
    current_stream(target.memory.device).submit(lambda: cells.fill(value))
