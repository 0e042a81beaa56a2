"""What every byte store must do. Authors of a store inherit from `StoreSuite` and say how to make one."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from hyper_ckpt.contracts.store import Bytes, ByteStore, Expect
from hyper_ckpt.errors import CheckpointReplacedError, FileSizeError, MissingFileError, StoreError

T = TypeVar("T")

NAMES = [
    "a",
    "dir/b",
    "deep/er/c.safetensors",
    "ünïcødé-名前-😀",
    "with space and 'quotes'",
    "new\nline",
    "-dash",
    ".dot",
]
BAD_NAMES = ["", "/absolute", "../outside", "a/../b", "a//b", "a/", "./a", "a/.", "nul\0", "lone\ud800"]


def put(store: ByteStore, name: str, data: Bytes, *, sync: bool = False) -> None:
    """Writes a whole object through a sink."""
    sink = store.create(name, memoryview(data).nbytes)
    sink.write_at(0, data)
    sink.close(sync=sync)


def get(store: ByteStore, name: str, start: int, length: int) -> bytes:
    """Reads one range."""
    data = bytearray(length)
    store.read_into(name, [(start, length)], [memoryview(data)])
    return bytes(data)


def at_once(calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Runs the calls in threads that start together. Returns what each returned or raised."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T | Exception:
        barrier.wait()
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


class StoreSuite:
    """The contract of `ByteStore` as tests: `class TestMine(StoreSuite)` with `make_store`."""

    def make_store(self, tmp_path: Path) -> ByteStore:
        """A store over a root that nobody has used; the same root for the same `tmp_path`."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> ByteStore:
        return self.make_store(tmp_path)

    def test_an_unused_root_is_empty(self, store: ByteStore) -> None:
        assert store.list() == []
        assert store.stat("a") is None
        store.delete("a")
        store.sync()
        assert store.list() == []

    @pytest.mark.parametrize("name", NAMES)
    def test_what_was_written_is_read(self, store: ByteStore, name: str) -> None:
        put(store, name, b"0123456789", sync=True)
        store.sync()
        info = store.stat(name)
        assert info is not None
        assert info.size == 10
        assert store.read(name) == b"0123456789"
        assert store.list() == [name]

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_bad_names_are_refused(self, store: ByteStore, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.create(name, 1),
            lambda: store.publish(name, b"", Expect.ANY, sync=False),
            lambda: store.read(name),
            lambda: get(store, name, 0, 1),
            lambda: store.stat(name),
            lambda: store.delete(name),
        ]
        for call in calls:
            with pytest.raises(StoreError, match="not an object name"):
                call()
        assert store.list() == []

    def test_another_store_of_the_same_root_sees_it(self, store: ByteStore, tmp_path: Path) -> None:
        put(store, "a", b"1")
        other = self.make_store(tmp_path)
        assert other.url == store.url
        assert other.read("a") == b"1"
        put(other, "b", b"2")
        assert store.list() == ["a", "b"]

    def test_ranges(self, store: ByteStore) -> None:
        put(store, "a", bytes(range(100)))
        ranges = [(10, 5), (15, 5), (0, 1), (99, 1), (50, 0), (15, 30), (0, 100)]
        buffers = [bytearray(length) for _, length in ranges]
        store.read_into("a", ranges, [memoryview(buffer) for buffer in buffers])
        assert buffers == [bytearray(range(start, start + length)) for start, length in ranges]

    def test_many_adjacent_ranges(self, store: ByteStore) -> None:
        data = os.urandom(15_000)
        put(store, "a", data)
        buffers = [bytearray(5) for _ in range(3000)]
        store.read_into("a", [(5 * i, 5) for i in range(3000)], [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == data

    def test_buffers_of_any_shape(self, store: ByteStore) -> None:
        sink = store.create("a", 24)
        sink.write_at(0, memoryview(bytes(range(24))).cast("I", (2, 3)))
        sink.close(sync=False)
        data = bytearray(24)
        store.read_into("a", [(0, 24)], [memoryview(data).cast("q", (3, 1))])
        assert data == bytes(range(24))

    def test_ranges_that_do_not_fit_their_buffers_are_refused(self, store: ByteStore) -> None:
        put(store, "a", b"0123456789")
        for start, length in [(0, 3), (0, 5), (-1, 4)]:
            with pytest.raises(Exception, match="fit"):
                store.read_into("a", [(start, length)], [memoryview(bytearray(4))])

    @pytest.mark.parametrize(("start", "length"), [(8, 3), (10, 1), (11, 1), (0, 11), (1 << 40, 1)])
    def test_a_short_read_is_an_error(self, store: ByteStore, start: int, length: int) -> None:
        put(store, "dir/a", b"0123456789")
        with pytest.raises(FileSizeError, match="dir/a"):
            get(store, "dir/a", start, length)

    def test_a_missing_object(self, store: ByteStore) -> None:
        put(store, "file", b"1")
        for name in ["gone", "dir/gone"]:
            assert store.stat(name) is None
            store.delete(name)
            with pytest.raises(MissingFileError, match=name):
                store.read(name)
            with pytest.raises(MissingFileError, match=name):
                get(store, name, 0, 1)
            with pytest.raises(MissingFileError, match=name):
                store.read_into(name, [], [])

    def test_an_existing_name_is_not_created_again(self, store: ByteStore) -> None:
        put(store, "a", b"old")
        with pytest.raises(StoreError, match=r"\ba\b"):
            put(store, "a", b"new")
        assert store.read("a") == b"old"

    def test_an_empty_object(self, store: ByteStore) -> None:
        put(store, "a", b"")
        info = store.stat("a")
        assert info is not None
        assert info.size == 0
        assert store.read("a") == b""
        store.read_into("a", [(0, 0)], [memoryview(bytearray())])

    def test_a_large_object_written_and_read_by_threads(self, store: ByteStore) -> None:
        block, blocks = 1 << 20, 32
        data = os.urandom(block) * blocks
        sink = store.create("a", len(data))

        def write(i: int) -> None:
            sink.write_at(i * block, memoryview(data)[i * block : (i + 1) * block])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, reversed(range(blocks))))
            sink.close(sync=False)
            read = list(pool.map(lambda i: get(store, "a", i * block, block), range(blocks)))
        assert b"".join(read) == data

    def test_writes_stay_inside(self, store: ByteStore) -> None:
        sink = store.create("dir/a", 4)
        for offset, data in [(-1, b"x"), (0, b"12345"), (4, b"x"), (5, b"")]:
            with pytest.raises(StoreError, match="dir/a"):
                sink.write_at(offset, data)
        sink.write_at(4, b"")
        sink.write_at(0, b"1234")
        sink.close(sync=False)
        assert store.read("dir/a") == b"1234"

    def test_a_closed_sink_takes_no_more(self, store: ByteStore) -> None:
        sink = store.create("a", 4)
        sink.write_at(0, b"1234")
        sink.close(sync=False)
        with pytest.raises(StoreError, match=r"\ba\b.*closed"):
            sink.write_at(0, b"5678")
        with pytest.raises(StoreError, match="closed"):
            sink.close(sync=False)
        assert store.read("a") == b"1234"

    def test_abort_removes_the_object(self, store: ByteStore) -> None:
        sink = store.create("dir/a", 4)
        sink.write_at(0, b"12")
        sink.abort()
        sink.abort()
        assert store.list() == []
        with pytest.raises(StoreError):
            sink.write_at(0, b"1234")
        put(store, "dir/a", b"again")
        sink.abort()
        assert store.read("dir/a") == b"again"

    def test_abort_after_close(self, store: ByteStore) -> None:
        sink = store.create("a", 4)
        sink.close(sync=False)
        sink.abort()
        assert store.list() == []

    def test_abort_while_threads_write(self, store: ByteStore) -> None:
        sink = store.create("a", 1 << 20)

        def write() -> None:
            for _ in range(20):
                sink.write_at(0, bytes(1 << 20))

        results = at_once([write, write, sink.abort])
        assert all(result is None or isinstance(result, StoreError) for result in results)
        assert store.list() == []

    def test_room_is_made_first(self, store: ByteStore) -> None:
        with pytest.raises(StoreError, match="dir/a"):
            store.create("dir/a", 1 << 60)
        assert store.list() == []

    def test_list_by_prefix(self, store: ByteStore) -> None:
        for name in ["b", "a/2", "a/1", "a-b", "ab/c"]:
            put(store, name, b"")
        assert store.list() == ["a-b", "a/1", "a/2", "ab/c", "b"]
        assert store.list("a") == ["a-b", "a/1", "a/2", "ab/c"]
        assert store.list("a/") == ["a/1", "a/2"]
        assert store.list("a/2") == ["a/2"]
        assert store.list("c") == store.list("../") == store.list("/") == []

    def test_delete(self, store: ByteStore) -> None:
        put(store, "dir/a", b"1")
        put(store, "dir/b", b"2")
        store.delete("dir")
        store.delete("dir/a")
        assert store.list() == ["dir/b"]
        store.delete("dir/b")
        store.delete("dir/b")
        assert store.list() == []
        put(store, "dir/a", b"3")
        assert store.read("dir/a") == b"3"

    def test_creating_beside_deleting(self, store: ByteStore) -> None:
        def churn(name: str) -> None:
            for _ in range(50):
                put(store, f"dir/{name}", b"1")
                store.delete(f"dir/{name}")

        assert at_once([lambda i=i: churn(str(i)) for i in range(4)]) == [None] * 4  # type: ignore[misc]
        assert store.list() == []

    @pytest.mark.parametrize("sync", [False, True])
    def test_publish(self, store: ByteStore, sync: bool) -> None:
        first = store.publish("dir/m", b"first", Expect.ABSENT, sync=sync)
        info = store.stat("dir/m")
        assert info is not None
        assert (info.etag, info.size) == (first, 5)
        second = store.publish("dir/m", b"second", first, sync=sync)
        assert second != first
        assert store.read("dir/m") == b"second"
        third = store.publish("dir/m", b"third", Expect.ANY, sync=sync)
        info = store.stat("dir/m")
        assert info is not None
        assert info.etag == third
        assert store.read("dir/m") == b"third"
        store.publish("other", b"", Expect.ANY, sync=sync)
        assert store.list() == ["dir/m", "other"]

    def test_publish_against_what_is_not_there(self, store: ByteStore, tmp_path: Path) -> None:
        other = self.make_store(tmp_path)
        old = store.publish("m", b"old", Expect.ABSENT, sync=False)
        new = other.publish("m", b"new", old, sync=False)
        for expect in (Expect.ABSENT, old, "", "nonsense"):
            with pytest.raises(CheckpointReplacedError, match=r"\bm\b"):
                store.publish("m", b"mine", expect, sync=False)
        assert store.read("m") == b"new"
        assert store.list() == ["m"]
        store.delete("m")
        with pytest.raises(CheckpointReplacedError):
            store.publish("m", b"mine", new, sync=False)
        assert store.list() == []

    def test_equal_bytes_have_another_etag(self, store: ByteStore) -> None:
        etags = {store.publish("m", b"same", Expect.ANY, sync=False) for _ in range(2)}
        assert len(etags) == 2

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_of_publishers_at_once_one_wins(self, tmp_path: Path, overwrite: bool) -> None:
        stores = [self.make_store(tmp_path) for _ in range(4)]
        for turn in range(20):
            name = f"m{turn}"
            expect = stores[0].publish(name, b"old", Expect.ABSENT, sync=False) if overwrite else Expect.ABSENT

            def publish(i: int, name: str = name, expect: Expect | str = expect) -> str:
                return stores[i].publish(name, b"new%d" % i, expect, sync=False)

            results = at_once([lambda i=i: publish(i) for i in range(4)])  # type: ignore[misc]
            winners = [i for i, result in enumerate(results) if isinstance(result, str)]
            losers = [result for result in results if isinstance(result, CheckpointReplacedError)]
            assert (len(winners), len(losers)) == (1, 3), results
            assert stores[0].read(name) == b"new%d" % winners[0]
        assert stores[0].list() == sorted(f"m{turn}" for turn in range(20))

    def test_a_reader_sees_old_or_new(self, tmp_path: Path) -> None:
        writer, reader = self.make_store(tmp_path), self.make_store(tmp_path)
        contents = [bytes([i]) * (1000 * (1 + i % 3)) for i in range(100)]
        writer.publish("m", contents[0], Expect.ABSENT, sync=False)

        def write() -> None:
            for data in contents:
                writer.publish("m", data, Expect.ANY, sync=False)

        def read() -> None:
            for _ in range(200):
                assert reader.read("m") in contents

        assert at_once([write, read]) == [None, None]

    def test_it_can_be_pickled(self, store: ByteStore) -> None:
        put(store, "a", b"1")
        twin = pickle.loads(pickle.dumps(store))
        assert twin.url == store.url
        assert twin.read("a") == b"1"
