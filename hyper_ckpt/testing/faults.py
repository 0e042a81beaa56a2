"""Stores that count, fail, show late or die on purpose, around any other store.

Each sees every operation on the store and on its sinks as an `Operation`, before it happens. They take the inner
store's place anywhere: a save or load that is given one doesn't know.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeVar

from hyper_ckpt.contracts.store import Bytes, ByteStore, Expect, ObjectInfo, Sink
from hyper_ckpt.errors import MissingFileError
from hyper_ckpt.storage.buffers import as_bytes
from hyper_ckpt.storage.names import temporary_name

Kind = Literal["create", "write_at", "close", "abort", "read", "list", "delete", "stat", "publish", "sync"]
T = TypeVar("T")


@dataclass(frozen=True)
class Operation:
    """One call on a store or on one of its sinks.

    Args:
        kind: the method; both `read_into` and `read` are a "read".
        name: of the object; the prefix of a "list"; empty for "sync".
        offset: where a "write_at" or a "read" begins.
        nbytes: how many a "write_at", "publish" or `read_into` moves, or a "create" wants; else 0.
        number: counts the operations of one wrapper from 1.
    """

    kind: Kind
    name: str
    offset: int
    nbytes: int
    number: int


class WrapperStore(ByteStore):
    """Passes everything on to `inner`, and tells `before` and `after`, for subclasses to override.

    Args:
        inner: the store that does the work.
    """

    def __init__(self, inner: ByteStore) -> None:
        self.inner = inner
        self.url = inner.url
        self._numbers = itertools.count(1)

    def before(self, operation: Operation, part: Callable[[], object] | None) -> None:
        """Called before each operation, from any thread; what it raises takes the operation's place.

        Args:
            part: does a part of the operation, as a process would that dies in the middle of it; None where
                there is nothing between not done and done.
        """

    def after(self, operation: Operation, result: object) -> None:
        """Called after each operation that succeeded."""

    def create(self, name: str, size: int) -> Sink:
        return _WrapperSink(self, name, self.run("create", name, lambda: self.inner.create(name, size), nbytes=size))

    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        offset, nbytes = ranges[0][0] if ranges else 0, sum(length for _, length in ranges)
        self.run("read", name, lambda: self.inner.read_into(name, ranges, buffers), offset=offset, nbytes=nbytes)

    def reading(self) -> AbstractContextManager[None]:
        return self.inner.reading()

    def read(self, name: str) -> bytes:
        return self.run("read", name, lambda: self.inner.read(name))

    def list(self, prefix: str = "") -> list[str]:
        return self.run("list", prefix, lambda: self.inner.list(prefix))

    def list_sizes(self) -> dict[str, int] | None:
        return self.run("list", "", self.inner.list_sizes)

    def delete(self, name: str) -> None:
        self.run("delete", name, lambda: self.inner.delete(name))

    def stat(self, name: str) -> ObjectInfo | None:
        return self.run("stat", name, lambda: self.inner.stat(name))

    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        def part() -> None:
            """What a store leaves that writes beside the object and then renames."""
            half = data[: len(data) // 2]
            temporary = self.inner.create(temporary_name(name), len(half))
            temporary.write_at(0, half)
            temporary.close(sync=False)

        def whole() -> str:
            return self.inner.publish(name, data, expect, sync=sync)

        return self.run("publish", name, whole, nbytes=len(data), part=part)

    def missing_folders(self) -> int:
        return self.inner.missing_folders()

    def remove_folders(self, most: int) -> None:
        self.inner.remove_folders(most)

    def sync(self) -> None:
        self.run("sync", "", self.inner.sync)

    def run(
        self,
        kind: Kind,
        name: str,
        action: Callable[[], T],
        *,
        offset: int = 0,
        nbytes: int = 0,
        part: Callable[[], object] | None = None,
    ) -> T:
        """One operation, from `before` to `after`."""
        operation = Operation(kind, name, offset, nbytes, next(self._numbers))
        self.before(operation, part)
        result = action()
        self.after(operation, result)
        return result


class _WrapperSink(Sink):
    def __init__(self, store: WrapperStore, name: str, inner: Sink) -> None:
        self._store = store
        self._name = name
        self._inner = inner

    def write_at(self, offset: int, data: Bytes) -> None:
        view = as_bytes(data)
        self._store.run(
            "write_at",
            self._name,
            lambda: self._inner.write_at(offset, view),
            offset=offset,
            nbytes=view.nbytes,
            part=lambda: self._inner.write_at(offset, view[: view.nbytes // 2]),
        )

    def close(self, *, sync: bool) -> None:
        self._store.run("close", self._name, lambda: self._inner.close(sync=sync))

    def abort(self) -> None:
        with contextlib.suppress(Exception):  # abort never raises: a fault here leaves the object behind
            self._store.run("abort", self._name, self._inner.abort)


class CountingStore(WrapperStore):
    """Keeps a log of what was tried, and counts the bytes that were moved."""

    def __init__(self, inner: ByteStore) -> None:
        super().__init__(inner)
        self.log: list[Operation] = []
        self.bytes_read = 0
        self.bytes_written = 0
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counter[str]:
        """Operations tried, by kind."""
        with self._lock:
            return Counter(operation.kind for operation in self.log)

    def before(self, operation: Operation, part: Callable[[], object] | None) -> None:
        with self._lock:
            self.log.append(operation)

    def after(self, operation: Operation, result: object) -> None:
        with self._lock:
            if operation.kind == "read":
                self.bytes_read += len(result) if isinstance(result, bytes) else operation.nbytes
            elif operation.kind in ("write_at", "publish"):
                self.bytes_written += operation.nbytes


class FaultyStore(WrapperStore):
    """Lets chosen operations fail. `fired` holds those that did: a test that injected nothing proves nothing.

    Args:
        inner: the store that does the rest of the work.
        fail: given an operation, the error that it shall raise, or None. It may also sleep or block. A fault in
            an "abort" can't be raised; the object then stays behind.
    """

    def __init__(self, inner: ByteStore, fail: Callable[[Operation], Exception | None]) -> None:
        super().__init__(inner)
        self.fired: list[Operation] = []
        self._fail = fail

    def before(self, operation: Operation, part: Callable[[], object] | None) -> None:
        error = self._fail(operation)
        if error is not None:
            self.fired.append(operation)
            raise error


class LateStore(WrapperStore):
    """Shows late what others wrote, as a client of a network file system may: objects that this very store did not
    write are not there for it until they are old enough. Its listings are remembered as long, in no order.

    Args:
        inner: the store that does the work, and that knows at once.
        seconds: how old an object must be.
        clock: what tells the time that `ObjectInfo.modified` is compared with.
    """

    def __init__(self, inner: ByteStore, seconds: float, clock: Callable[[], float] = time.time) -> None:
        super().__init__(inner)
        self._seconds, self._clock = seconds, clock
        self._own: set[str] = set()
        self._listed: tuple[float, dict[str, int]] | None = None

    def create(self, name: str, size: int) -> Sink:
        self._own.add(name)
        return super().create(name, size)

    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        etag = super().publish(name, data, expect, sync=sync)
        self._own.add(name)
        return etag

    def stat(self, name: str) -> ObjectInfo | None:
        info = super().stat(name)
        return info if info is not None and self._shows(name, info) else None

    def read(self, name: str) -> bytes:
        self._refuse_unseen(name)
        return super().read(name)

    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        self._refuse_unseen(name)
        super().read_into(name, ranges, buffers)

    def list(self, prefix: str = "") -> list[str]:
        return [name for name in self.list_sizes() if name.startswith(prefix)]

    def list_sizes(self) -> dict[str, int]:
        now = self._clock()
        if self._listed is None or now - self._listed[0] >= self._seconds:
            found = [(name, self.stat(name)) for name in reversed(super().list())]
            self._listed = now, {name: info.size for name, info in found if info is not None}
        return self._listed[1]

    def _shows(self, name: str, info: ObjectInfo) -> bool:
        return name in self._own or self._clock() - info.modified >= self._seconds

    def _refuse_unseen(self, name: str) -> None:
        info = self.inner.stat(name)
        if info is not None and not self._shows(name, info):
            raise MissingFileError(f"reading {self.url}/{name} failed: it is not shown yet")


class Killed(BaseException):
    """Stands for the death of the process. No `except Exception` catches it."""


def kill_process() -> None:
    """Ends this process at once, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


class KillAt(WrapperStore):
    """Dies at the k-th operation.

    With a `kill` that returns, death is played inside the process: the k-th operation and all that follow, on any
    thread, raise `Killed` and do nothing, so that clean-up code can't clean up what a dead process would leave.

    Args:
        inner: the store that does the work until then.
        k: number of the operation, from 1; `CountingStore.log` tells how many there are.
        kill: ends the process.
        when: "before" the operation; "after" it, when the caller doesn't know yet; or "inside" it: half of the
            bytes written, half of a published object in a temporary one beside it, and "before" where an
            operation has no middle.
    """

    def __init__(
        self,
        inner: ByteStore,
        k: int,
        kill: Callable[[], object] = kill_process,
        when: Literal["before", "inside", "after"] = "before",
    ) -> None:
        super().__init__(inner)
        self._k = k
        self._kill = kill
        self._when = when

    def before(self, operation: Operation, part: Callable[[], object] | None) -> None:
        if operation.number < self._k or (operation.number == self._k and self._when == "after"):
            return
        if operation.number == self._k and self._when == "inside" and part is not None:
            part()
        self._die(operation)

    def after(self, operation: Operation, result: object) -> None:
        if operation.number == self._k:
            self._die(operation)

    def _die(self, operation: Operation) -> None:
        self._kill()
        raise Killed(f"at {operation}")
