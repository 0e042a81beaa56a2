"""The wrappers that count, fail and die: what they let through, and what they leave behind."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hyper_ckpt.contracts.store import ByteStore, Expect
from hyper_ckpt.errors import StoreError
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.names import is_temporary
from hyper_ckpt.testing.conformance.store import at_once, get, put
from hyper_ckpt.testing.faults import CountingStore, FaultyStore, KillAt, Killed, Operation, WrapperStore


@pytest.fixture
def inner(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def story(store: ByteStore) -> None:
    """A little of everything, as a save does it."""
    sink = store.create("data", 8)
    try:
        sink.write_at(0, b"0123")
        sink.write_at(4, b"4567")
        sink.close(sync=True)
    except BaseException:
        sink.abort()
        raise
    store.sync()
    store.publish("m", b"whole", Expect.ABSENT, sync=True)
    assert get(store, "data", 2, 3) == b"234"
    assert store.read("m") == b"whole"
    assert store.stat("m") is not None
    assert store.list() == ["data", "m"]
    store.delete("data")


def test_a_wrapper_hides_nothing(inner: LocalStore) -> None:
    store = WrapperStore(inner)
    assert store.url == inner.url
    story(store)
    assert inner.list() == ["m"]


def test_counting(inner: LocalStore) -> None:
    store = CountingStore(inner)
    story(store)
    assert [(op.kind, op.name, op.offset, op.nbytes) for op in store.log] == [
        ("create", "data", 0, 8),
        ("write_at", "data", 0, 4),
        ("write_at", "data", 4, 4),
        ("close", "data", 0, 0),
        ("sync", "", 0, 0),
        ("publish", "m", 0, 5),
        ("read", "data", 2, 3),
        ("read", "m", 0, 0),
        ("stat", "m", 0, 0),
        ("list", "", 0, 0),
        ("delete", "data", 0, 0),
    ]
    assert [op.number for op in store.log] == list(range(1, 12))
    assert store.counts["write_at"] == store.counts["read"] == 2
    assert store.bytes_written == 8 + 5
    assert store.bytes_read == 3 + 5


def test_counting_from_threads(inner: LocalStore) -> None:
    store = CountingStore(inner)
    sink = store.create("a", 400)

    def write() -> None:
        for i in range(100):
            sink.write_at(i, b"x")

    at_once([write] * 4)
    assert store.counts == {"create": 1, "write_at": 400}
    assert store.bytes_written == 400
    assert sorted(op.number for op in store.log) == list(range(1, 402))


def test_what_failed_is_logged_but_moved_nothing(inner: LocalStore) -> None:
    store = CountingStore(FaultyStore(inner, lambda op: StoreError("full") if op.kind == "write_at" else None))
    with pytest.raises(StoreError):
        story(store)
    assert store.counts == {"create": 1, "write_at": 1, "abort": 1}
    assert store.bytes_written == 0


@pytest.mark.parametrize("kind", ["create", "write_at", "close", "sync", "publish", "read", "stat", "list", "delete"])
def test_every_kind_of_operation_can_fail(inner: LocalStore, kind: str) -> None:
    store = FaultyStore(inner, lambda op: OSError("injected") if op.kind == kind else None)
    with pytest.raises(OSError, match="injected"):
        story(store)
    assert [op.kind for op in store.fired] == [kind]
    if kind in ("create", "write_at", "close"):
        assert inner.list() == []


def test_a_fault_in_abort_leaves_the_object(inner: LocalStore) -> None:
    store = FaultyStore(inner, lambda op: StoreError("injected") if op.kind in ("close", "abort") else None)
    with pytest.raises(StoreError):
        story(store)
    assert [op.kind for op in store.fired] == ["close", "abort"]
    assert inner.list() == ["data"]


def number_of(kind: str) -> int:
    kinds = ["create", "write_at", "write_at", "close", "sync", "publish", "read", "read", "stat", "list", "delete"]
    return kinds.index(kind) + 1


def played(inner: ByteStore, k: int, when: str) -> Killed:
    with pytest.raises(Killed) as caught:
        story(KillAt(inner, k, lambda: None, when))
    return caught.value


@pytest.mark.parametrize("when", ["before", "inside", "after"])
@pytest.mark.parametrize("k", range(1, 12))
def test_killed_anywhere_a_published_object_is_whole_or_absent(inner: LocalStore, k: int, when: str) -> None:
    played(inner, k, when)
    names = [name for name in inner.list() if not is_temporary(name)]
    published = k > number_of("publish") or (k == number_of("publish") and when == "after")
    assert ("m" in names) == published
    if published:
        assert inner.read("m") == b"whole"
    done = k + (when == "after") > number_of("create")
    deleted = k + (when == "after") > number_of("delete")
    assert ("data" in names) == (done and not deleted), "clean-up after death must do nothing"


def test_inside_a_write(inner: LocalStore) -> None:
    played(inner, 2, "inside")
    assert inner.read("data") == b"01" + bytes(6)


def test_inside_a_publication(inner: LocalStore) -> None:
    played(inner, number_of("publish"), "inside")
    (left,) = [name for name in inner.list() if name != "data"]
    assert is_temporary(left)
    assert inner.read(left) == b"wh"


def test_death_is_for_all_threads(inner: LocalStore) -> None:
    store = KillAt(inner, 10, lambda: None)
    deaths = []

    def write(i: int) -> None:
        try:
            for turn in range(10):
                put(store, f"{i}-{turn}", b"1")
        except Killed as death:
            deaths.append(death)

    at_once([lambda i=i: write(i) for i in range(4)])
    assert len(deaths) == 4
    with pytest.raises(Killed):
        store.list()


def test_the_process_dies(inner: LocalStore) -> None:
    script = (
        "import sys\n"
        "from hyper_ckpt.storage.local_store import LocalStore\n"
        "from hyper_ckpt.testing.faults import KillAt\n"
        "sink = KillAt(LocalStore(sys.argv[1]), 3).create('a', 4)\n"
        "sink.write_at(0, b'12')\n"
        "try:\n"
        "    sink.write_at(2, b'34')\n"
        "finally:\n"
        "    sink.abort()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, inner.url], check=False)
    assert done.returncode == -9
    assert inner.read("a") == b"12\0\0"


def test_a_custom_kill(inner: LocalStore) -> None:
    def kill() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        KillAt(inner, 1, kill).list()


def test_own_wrappers(inner: LocalStore) -> None:
    class Upper(WrapperStore):
        def before(self, operation: Operation, part: Callable[[], object] | None) -> None:
            if operation.kind == "publish":
                assert part is not None
                part()

    Upper(inner).publish("m", b"whole", Expect.ABSENT, sync=False)
    assert inner.read("m") == b"whole"
    assert len(inner.list("m.tmp-")) == 1
