"""A checkpoint is published only when rank 0 sees what all ranks wrote: late objects, vanished ones, separate disks."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyper_ckpt import CheckpointManager, async_save, save
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.engine import visible
from hyper_ckpt.engine.visible import LOOK_SECONDS, Expected, require_visible
from hyper_ckpt.errors import StoreError
from hyper_ckpt.registry import Registry
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.faults import CountingStore, LateStore, WrapperStore
from hyper_ckpt.testing.world import run_world

from ._ranks import all_fail
from ._states import assert_holds, assert_no_leftovers, files_in, part
from ._stores import through

WORLD = 3


class Elsewhere(WrapperStore):
    """A node's own disk, under the path that all ranks use."""

    def __init__(self, inner: ByteStore, folder: Path) -> None:
        super().__init__(LocalStore(folder))
        self.url = inner.url


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.slept = time.time(), list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def written(store: ByteStore, names: str = "abc") -> list[Expected]:
    for name in names:
        put(store, name)
    return [Expected(name, 5, rank) for rank, name in enumerate(names)]


def put(store: ByteStore, name: str, size: int = 5) -> None:
    store.create(name, size).close(sync=False)


# ------------------------------------------------------------------ how it looks


@pytest.mark.parametrize("late", [0.5, 20.0, 60.0, 89.0])
def test_objects_that_show_within_the_limit(tmp_path: Path, late: float) -> None:
    clock, inner = Clock(), LocalStore(tmp_path / "c")
    expected = written(inner)
    require_visible(LateStore(inner, late, clock), expected, LOOK_SECONDS, 4, clock=clock, sleep=clock.sleep)
    assert late - 1 <= sum(clock.slept) <= late + 5, "a look every few seconds, and none after it is there"


def test_objects_that_do_not_show_are_looked_for_until_the_limit(tmp_path: Path) -> None:
    clock, inner = Clock(), LocalStore(tmp_path / "c")
    expected = written(inner)
    with pytest.raises(StoreError, match="rank 0"):
        require_visible(LateStore(inner, 1000, clock), expected, LOOK_SECONDS, 4, clock=clock, sleep=clock.sleep)
    assert sum(clock.slept) == pytest.approx(LOOK_SECONDS)
    assert LOOK_SECONDS >= 90


def test_one_listing_is_enough_where_it_shows_all() -> None:
    MemoryStore.drop_bucket("visible")
    store = CountingStore(MemoryStore("memory://visible/c"))
    require_visible(store, written(store), LOOK_SECONDS, 4)
    assert {k: n for k, n in store.counts.items() if k in ("list", "stat", "read")} == {"list": 1}


def test_what_a_listing_does_not_show_is_looked_at_by_name(tmp_path: Path) -> None:
    class OldListing(WrapperStore):
        def list_sizes(self) -> dict[str, int]:
            return {"a": 5, "b": 4}

    store = OldListing(LocalStore(tmp_path / "c"))
    require_visible(store, written(store), 0.0, 4, sleep=lambda _: pytest.fail("there was nothing to wait for"))


@pytest.mark.parametrize("size", [0, 4, 6])
def test_another_size_is_not_there(tmp_path: Path, size: int) -> None:
    store = LocalStore(tmp_path / "c")
    expected = written(store, "ab")
    store.delete("b")
    put(store, "b", size)
    with pytest.raises(StoreError, match="b, which rank 1 wrote"):
        require_visible(store, expected, 0.0, 4)


def test_very_many_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "c")
    for i in range(1000):
        put(store, f"f{i}", 1)
    expected = [Expected(f"f{i}", 1, i) for i in range(1000)]
    require_visible(store, expected, 0.0, 8)
    for i in (700, 900):
        store.delete(f"f{i}")
    with pytest.raises(StoreError, match=r"f700, which rank 700 wrote.* and of 1 more rank"):
        require_visible(store, expected, 0.0, 8)


# ------------------------------------------------------------------ whole saves


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "LOOK_SECONDS", 1.0)


Call = Callable[[dict[str, Any], Path, Platform], object]


def by_manager(state: dict[str, Any], path: Path, platform: Platform) -> object:
    with CheckpointManager(path.parent, platform=platform, on_sigterm=False) as manager:
        return manager.save(5, state, timeout=20)


CALLS: dict[str, Call] = {
    "save": lambda state, path, p: save(state, path, platform=p, timeout=20, overwrite=True),
    "async_save": lambda state, path, p: async_save(state, path, platform=p, timeout=20, overwrite=True).result(),
    "manager": by_manager,
}


def at(path: Path, wrap: Callable[[ByteStore], ByteStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store at the path is the wrapped one, for all ranks: `wrap` chooses by the thread."""
    opened = Registry.store

    def store(self: Registry, url: str) -> ByteStore:
        return wrap(opened(self, url)) if url == str(path) else opened(self, url)

    monkeypatch.setattr(Registry, "store", store)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("_impatient")
def test_a_rank_with_a_disk_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, overwrite: bool
) -> None:
    path, own = tmp_path / "run" / "step-0000000005", tmp_path / "own disk"
    if overwrite:
        run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))
    before = files_in(path) if overwrite else set()

    def choose(store: ByteStore) -> ByteStore:
        return Elsewhere(store, own) if threading.current_thread() in elsewhere else store

    elsewhere: set[threading.Thread] = set()
    at(path, choose, monkeypatch)

    def run(platform: Platform) -> None:
        if platform.ranks.rank == 1:
            elsewhere.add(threading.current_thread())
        CALLS[call](part(2, platform.ranks.rank, WORLD), path, platform)

    error = all_fail(WORLD, run, tmp_path / "scratch")
    assert type(error) is StoreError
    assert "which rank 1 wrote" in str(error)
    assert "not one file system that all ranks share" in str(error)
    assert (files_in(path) if path.exists() else set()) == before
    assert files_in(own) == set(), "also rank 1 removed what it wrote"
    if overwrite:
        assert_holds(path, 1)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("pattern", ["rank-00001-*.safetensors", "receipts/rank-00001-*", "rank-00000-*.safetensors"])
@pytest.mark.usefixtures("_impatient")
def test_files_that_vanish_before_the_manifest_is_published(tmp_path: Path, pattern: str, overwrite: bool) -> None:
    path = tmp_path / "ckpt"
    if overwrite:
        run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))
    before, removed = files_in(path) if overwrite else set(), list[Path]()

    class Vanishing(WrapperStore):
        def list_sizes(self) -> None:
            """Asked when all ranks have written, checked, and said so."""
            removed.extend(f for f in path.glob(pattern) if f.relative_to(path).as_posix() not in before)
            for each in removed:
                each.unlink()

    def rank_main(platform: Platform) -> None:
        rank = platform.ranks.rank
        url = through(path, Vanishing if rank == 0 else lambda s: s)
        save(part(2, rank, WORLD), url, platform=platform, timeout=20, overwrite=True)

    error = all_fail(WORLD, rank_main, tmp_path / "scratch")
    assert removed
    assert type(error) is StoreError
    assert f"which rank {pattern.partition('rank-')[2][4]} wrote" in str(error)
    assert "removed, moved or cut meanwhile" in str(error)
    assert files_in(path) == before
    if overwrite:
        assert_holds(path, 1)


@pytest.mark.parametrize("overwrite", [False, True])
def test_rank_0_sees_all_others_late(tmp_path: Path, overwrite: bool) -> None:
    path, seconds = tmp_path / "ckpt", 1.0
    if overwrite:
        run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))
    for name in files_in(path) if overwrite else ():
        os.utime(path / name, (0, 0))

    def rank_main(platform: Platform) -> None:
        rank = platform.ranks.rank
        url = through(path, (lambda s: LateStore(s, seconds)) if rank == 0 else lambda s: s)
        save(part(2, rank, WORLD), url, platform=platform, overwrite=overwrite)

    run_world(WORLD, rank_main)
    assert_holds(path, 2)
    assert_no_leftovers(path)


@pytest.mark.parametrize("gone", [False, True])
def test_a_manifest_that_is_not_there_once_it_was_published(tmp_path: Path, gone: bool) -> None:
    """What it should have replaced keeps its files."""
    path = tmp_path / "ckpt"
    save(part(1), path, no_dist=True)
    old = files_in(path)

    class PutBack(WrapperStore):
        def publish(self, name: str, data: bytes, expect: Any, *, sync: bool) -> str:
            before = (path / "manifest.json").read_bytes()
            etag = super().publish(name, data, expect, sync=sync)
            if name == "manifest.json":
                (path / name).unlink()
                if not gone:
                    (path / name).write_bytes(before)
            return etag

    with pytest.raises(StoreError, match="was published, but is not there"):
        save(part(2), through(path, PutBack), no_dist=True, overwrite=True)
    assert files_in(path) == old - ({"manifest.json"} if gone else set())
    if not gone:
        assert_holds(path, 1)


def test_a_new_checkpoint_that_another_program_removes_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As retention of another manager does with a step that is older than its own: the save was well."""
    path = tmp_path / "ckpt"

    class Removes(WrapperStore):
        def publish(self, name: str, data: bytes, expect: Any, *, sync: bool) -> str:
            etag = super().publish(name, data, expect, sync=sync)
            if name == "manifest.json":
                (path / name).unlink()
            return etag

    save(part(1), through(path, Removes), no_dist=True)
    assert "another program has removed it since" in caplog.text
