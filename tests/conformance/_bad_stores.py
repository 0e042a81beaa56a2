"""For each check of a store, one that breaks what it is about: a wrapper around a store that keeps all."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hyper_ckpt.contracts.store import Bytes, ByteStore, Expect, ObjectInfo, Sink
from hyper_ckpt.errors import FileSizeError, MissingFileError, StoreError
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.faults import WrapperStore

from .check_then_act import CheckThenAct

_numbers = itertools.count()


class FilledRoot(WrapperStore):
    def list(self, prefix: str = "") -> list[str]:
        return sorted([*super().list(prefix), *([".lock"] if not prefix else [])])


class OtherNames(WrapperStore):
    """As on file systems that spell names in their own way."""

    def list(self, prefix: str = "") -> list[str]:
        return sorted(unicodedata.normalize("NFD", name) for name in super().list(prefix))


class AnyName(WrapperStore):
    def stat(self, name: str) -> ObjectInfo | None:
        try:
            return super().stat(name)
        except StoreError:
            return None


class OnlyMine(WrapperStore):
    """Each instance keeps its own objects."""

    def __init__(self, inner: ByteStore) -> None:
        super().__init__(MemoryStore(f"memory://only-mine-{next(_numbers)}"))
        self.url = inner.url


class FromTheStart(WrapperStore):
    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        super().read_into(name, [(0, length) for _, length in ranges], buffers)


class StaysOpen(WrapperStore):
    """Keeps what it has read inside `reading` for good."""

    def __init__(self, inner: ByteStore) -> None:
        super().__init__(inner)
        self._kept: dict[str, bytes] | None = None

    def reading(self) -> contextlib.AbstractContextManager[None]:
        self._kept = {}
        return super().reading()

    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        if self._kept is None:
            super().read_into(name, ranges, buffers)
            return
        data = self._kept.setdefault(name, self.inner.read(name))
        for (start, length), buffer in zip(ranges, buffers, strict=True):
            buffer[:] = data[start : start + length]


class FirstThousand(WrapperStore):
    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        super().read_into(name, ranges[:1024], buffers[:1024])


class FlatBuffers(WrapperStore):
    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            buffer[:0] = b""  # one-dimensional bytes only
        super().read_into(name, ranges, buffers)


class AnyLength(WrapperStore):
    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        fitting = [(max(s, 0), min(n, b.nbytes)) for (s, n), b in zip(ranges, buffers, strict=True)]
        super().read_into(name, fitting, [b[:n] for (_, n), b in zip(fitting, buffers, strict=True)])


class PadsReads(WrapperStore):
    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        try:
            super().read_into(name, ranges, buffers)
        except FileSizeError:
            for buffer in buffers:
                buffer[:] = bytes(buffer.nbytes)


class MissingIsEmpty(WrapperStore):
    def read(self, name: str) -> bytes:
        try:
            return super().read(name)
        except MissingFileError:
            return b""


class EmptyIsMissing(WrapperStore):
    def stat(self, name: str) -> ObjectInfo | None:
        info = super().stat(name)
        return info if info and info.size else None


class Directories(WrapperStore):
    def list(self, prefix: str = "") -> list[str]:
        return super().list(prefix and prefix.rstrip("/") + "/")


class OnePage(WrapperStore):
    def list(self, prefix: str = "") -> list[str]:
        return super().list(prefix)[:1000]


class DeletesTrees(WrapperStore):
    def delete(self, name: str) -> None:
        super().delete(name)
        for other in self.inner.list(name + "/"):
            super().delete(other)


class NoParents(WrapperStore):
    deleted = False

    def delete(self, name: str) -> None:
        super().delete(name)
        self.deleted = True

    def create(self, name: str, size: int) -> Sink:
        if self.deleted and "/" in name:
            raise StoreError(f"creating {name} failed: its directory does not exist")
        return super().create(name, size)


class NoPickle(WrapperStore):
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a connection")


class CreatesOver(WrapperStore):
    def create(self, name: str, size: int) -> Sink:
        self.inner.delete(name)
        return super().create(name, size)


class GoodSink(Sink):
    """Passes everything on."""

    def __init__(self, inner: Sink, store: ByteStore, name: str, size: int) -> None:
        self.inner, self.store, self.name, self.size = inner, store, name, size
        self.written = 0
        self.closed = self.aborted = False

    def write_at(self, offset: int, data: Bytes) -> None:
        self.inner.write_at(offset, data)

    def close(self, *, sync: bool) -> None:
        self.inner.close(sync=sync)
        self.closed = True

    def abort(self) -> None:
        self.aborted = True
        self.inner.abort()


class Appends(GoodSink):
    lock = threading.Lock()

    def write_at(self, offset: int, data: Bytes) -> None:
        with self.lock:
            super().write_at(self.written, data)
            self.written += memoryview(data).nbytes


class WritesAnywhere(GoodSink):
    def write_at(self, offset: int, data: Bytes) -> None:
        if 0 <= offset <= self.size - memoryview(data).nbytes:
            super().write_at(offset, data)


class EndsWhereItWasWritten(GoodSink):
    def write_at(self, offset: int, data: Bytes) -> None:
        super().write_at(offset, data)
        self.written = max(self.written, offset + memoryview(data).nbytes)

    def close(self, *, sync: bool) -> None:
        super().close(sync=sync)
        self.store.publish(self.name, self.store.read(self.name)[: self.written], Expect.ANY, sync=False)


class NeverClosed(GoodSink):
    def write_at(self, offset: int, data: Bytes) -> None:
        if not self.closed:
            super().write_at(offset, data)


class AbortLeaves(GoodSink):
    def abort(self) -> None:
        if not self.closed:
            self.close(sync=False)


class NoAbortAfterClose(GoodSink):
    def abort(self) -> None:
        if not self.closed:
            super().abort()


class RawErrors(GoodSink):
    """Writes go on until the abort, and then fail as a closed file does."""

    def write_at(self, offset: int, data: Bytes) -> None:
        for _ in range(500):
            if self.aborted:
                raise ValueError("I/O operation on closed file")
            time.sleep(0.01)


def with_sink(kind: type[GoodSink]) -> type[WrapperStore]:
    class WithSink(WrapperStore):
        def create(self, name: str, size: int) -> Sink:
            return kind(super().create(name, size), self.inner, name, size)

    return WithSink


class RoomLater(WrapperStore):
    def create(self, name: str, size: int) -> Sink:
        return super().create(name, min(size, 1 << 20))


class HidesOthers(WrapperStore):
    """Shows nothing while an object is written."""

    def create(self, name: str, size: int) -> Sink:
        store = self

        class Hiding(GoodSink):
            def close(self, *, sync: bool) -> None:
                super().close(sync=sync)
                store.open -= 1

        self.open += 1
        return Hiding(super().create(name, size), self.inner, name, size)

    open = 0

    def list(self, prefix: str = "") -> list[str]:
        return [] if self.open else super().list(prefix)


class OtherEtag(WrapperStore):
    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        return super().publish(name, data, expect, sync=sync) + "!"


class ExpectsAnything(WrapperStore):
    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        return super().publish(name, data, Expect.ANY, sync=sync)


class EtagsOfContents(WrapperStore):
    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        super().publish(name, data, expect, sync=sync)
        return hashlib.md5(data).hexdigest()


class NoTimes(WrapperStore):
    def stat(self, name: str) -> ObjectInfo | None:
        info = super().stat(name)
        return info and ObjectInfo(info.size, info.etag, 0.0)


class FourMib(WrapperStore):
    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        return super().publish(name, data[: 4 << 20], expect, sync=sync)


class RemovesFirst(WrapperStore):
    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        self.inner.delete(name)
        time.sleep(0.001)
        return super().publish(name, data, Expect.ANY, sync=sync)


class ElsewhereInOtherProcesses(WrapperStore):
    def __reduce__(self) -> Any:
        return LocalStore, (f"{self.url}-elsewhere",)


def local(kind: type[WrapperStore]) -> Callable[[Path], ByteStore]:
    """The bad store over one that keeps every promise."""
    return lambda path: kind(LocalStore(path / "root"))


BAD_STORES: dict[str, Callable[[Path], ByteStore]] = {
    "an_unused_root_is_empty": local(FilledRoot),
    "what_was_written_is_read": local(OtherNames),
    "bad_names_are_refused": local(AnyName),
    "another_store_of_the_same_root_sees_it": local(OnlyMine),
    "ranges_are_read": local(FromTheStart),
    "what_stays_open_is_read_alike": local(StaysOpen),
    "many_adjacent_ranges_are_read": local(FirstThousand),
    "buffers_may_have_any_shape": local(FlatBuffers),
    "ranges_must_fit_their_buffers": local(AnyLength),
    "a_short_read_is_an_error": local(PadsReads),
    "a_missing_object_is_an_error": local(MissingIsEmpty),
    "an_empty_object_is_an_object": local(EmptyIsMissing),
    "large_objects_by_several_threads": local(with_sink(Appends)),
    "lists_by_prefix": local(Directories),
    "long_lists_are_complete": local(OnePage),
    "deleted_objects_are_gone": local(DeletesTrees),
    "creating_beside_deleting": local(NoParents),
    "it_can_be_pickled": local(NoPickle),
    "an_existing_name_is_not_created_again": local(CreatesOver),
    "writes_stay_inside": local(with_sink(WritesAnywhere)),
    "an_object_has_the_size_it_was_made_for": local(with_sink(EndsWhereItWasWritten)),
    "a_closed_sink_takes_no_more": local(with_sink(NeverClosed)),
    "abort_removes_the_object": local(with_sink(AbortLeaves)),
    "abort_after_close_removes_the_object": local(with_sink(NoAbortAfterClose)),
    "abort_while_threads_write": local(with_sink(RawErrors)),
    "room_is_made_first": local(RoomLater),
    "unfinished_objects_disturb_nobody": local(HidesOthers),
    "published_objects_are_there": local(OtherEtag),
    "publish_refuses_what_is_not_expected": local(ExpectsAnything),
    "etags_change_with_every_publish": local(EtagsOfContents),
    "facts_are_of_the_object": local(NoTimes),
    "large_objects_are_published": local(FourMib),
    "of_publishers_of_a_new_object_one_wins": local(CheckThenAct),
    "of_publishers_by_token_one_wins": local(CheckThenAct),
    "readers_see_old_or_new": local(RemovesFirst),
    "writers_in_several_processes": local(ElsewhereInOtherProcesses),
    "publishers_in_several_processes": local(CheckThenAct),
}
