"""async_save: staged and complete are two moments, saves keep their order, failures are never lost."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import SaveHandle, SaveOptions, async_save, load, read, save
from hyper_ckpt.contracts.platform import LocalShard, Pending, Platform, Ranks
from hyper_ckpt.errors import CheckpointError, SaveInFlightError, StoreError, UnsupportedStateError
from hyper_ckpt.layout import Mesh, MeshLayout, Shard
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.meshed import MeshedStager, distribute, meshed_platform
from hyper_ckpt.testing.world import run_world


class Gate:
    """Stores whose writes wait until they are let through, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.order: list[str] = []
        self.fails: str | None = None
        original = MemoryStore.create
        publish = MemoryStore.publish

        def create(store: Any, name: str, size: int) -> Any:
            self.open.wait(30)
            if self.fails is not None and self.fails in f"{store.url}/{name}":
                raise StoreError(f"{store.url}/{name}: no space")
            return original(store, name, size)

        def published(store: Any, name: str, *args: Any, **options: Any) -> str:
            etag = publish(store, name, *args, **options)
            if name == "manifest.json":
                self.order.append(store.url.rpartition("/")[2])
            return etag

        monkeypatch.setattr(MemoryStore, "create", create)
        monkeypatch.setattr(MemoryStore, "publish", published)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def root() -> Iterator[str]:
    name = f"async-{time.monotonic_ns()}"
    yield f"memory://{name}"
    MemoryStore.drop_bucket(name)


@pytest.fixture
def platform() -> Platform:
    """Of this test alone: what is in flight, and what failed, belongs to a platform."""
    return hyper_ckpt.NumpyPlatform()


def state(value: float = 1.0) -> dict[str, Any]:
    big = np.full((300, 1000), value)
    return {"big": big, "columns": big[:, ::3], "small": np.full(5, value, "f4"), "step": int(value), "empty": big[:0]}


def equal(found: dict[str, Any], value: float) -> bool:
    want = state(value)
    return all(np.array_equal(found[k], want[k]) for k in want)


def test_the_file_holds_what_was_there_when_it_was_staged(root: str, gate: Gate, platform: Platform) -> None:
    original = state(1.0)
    handle = async_save(original, f"{root}/c", platform=platform)
    handle.wait_staged(10)
    original["big"].fill(9)
    original["small"].fill(9)
    assert not handle.done()
    gate.open.set()
    metadata = handle.result(30)
    assert handle.done()
    assert metadata.save_id == hyper_ckpt.read_metadata(f"{root}/c").save_id
    assert equal(read(f"{root}/c"), 1.0)


def test_waiting_says_how_long(root: str, gate: Gate, platform: Platform) -> None:
    handle = async_save(state(), f"{root}/c", platform=platform)
    for wait in (handle.result, handle.exception):
        with pytest.raises(SaveInFlightError, match=r"c is not complete after 0\.01 s"):
            wait(0.01)
    with pytest.raises(SaveInFlightError, match=r"still in flight after 0\.05 s.*max_in_flight"):
        async_save(state(), f"{root}/d", platform=platform, timeout=0.05)
    with pytest.raises(SaveInFlightError):
        save(state(), f"{root}/d", platform=platform, timeout=0.05)
    gate.open.set()
    assert handle.exception(30) is None


@pytest.mark.parametrize("most", [1, 3])
def test_in_flight_is_bounded_and_the_order_is_kept(root: str, gate: Gate, platform: Platform, most: int) -> None:
    handles: list[SaveHandle] = []
    threading.Timer(0.2, gate.open.set).start()
    options = SaveOptions(max_in_flight=most)
    for i in range(5):
        handles.append(async_save(state(i), f"{root}/{i}", platform=platform, options=options))
        assert sum(not h.done() for h in handles) <= most
    assert max(range(5), key=lambda i: handles[i].waited) == most, "it waited until the gate was opened"
    save(state(5), f"{root}/5", platform=platform)
    assert gate.order == [str(i) for i in range(6)], "a save after them waits for all"
    assert all(equal(read(f"{root}/{i}"), i) for i in range(6))


def test_a_failure_is_on_the_handle(root: str, gate: Gate, platform: Platform) -> None:
    gate.open.set()
    gate.fails = "/bad/"
    handle = async_save(state(), f"{root}/bad", platform=platform)
    with pytest.raises(StoreError, match="no space"):
        handle.result(30)
    assert isinstance(handle.exception(), StoreError)
    save(state(), f"{root}/good", platform=platform)  # it was told: no need to tell it twice
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read(f"{root}/bad")


@pytest.mark.parametrize("call", [save, async_save])
def test_a_failure_nobody_asked_for_is_raised_by_the_next_call(
    root: str, gate: Gate, platform: Platform, call: Callable[..., Any]
) -> None:
    gate.open.set()
    gate.fails = "/bad/"
    async_save(state(), f"{root}/bad", platform=platform)
    with pytest.raises(StoreError, match=r"bad.*no space"):
        call(state(), f"{root}/good", platform=platform)
    with async_save(state(2), f"{root}/good", platform=platform):
        pass
    assert equal(read(f"{root}/good"), 2)


def test_leaving_the_context_waits_and_raises(root: str, gate: Gate, platform: Platform) -> None:
    gate.open.set()
    with async_save(state(), f"{root}/c", platform=platform) as handle:
        pass
    assert handle.done()
    gate.fails = "/bad/"
    with pytest.raises(StoreError), async_save(state(), f"{root}/bad", platform=platform):
        pass
    with pytest.raises(KeyError), async_save(state(), f"{root}/bad", platform=platform):
        raise KeyError("mine")
    with pytest.raises(StoreError):
        save(state(), f"{root}/c2", platform=platform)


def test_what_fails_before_it_is_staged_raises_at_once(root: str, platform: Platform) -> None:
    with pytest.raises(UnsupportedStateError, match="'bad'"):
        async_save({"bad": object()}, f"{root}/c", platform=platform)
    with pytest.raises(ValueError, match="checkpoint_id"):
        async_save({})
    save(state(), f"{root}/c", platform=platform)
    with pytest.raises(hyper_ckpt.errors.CheckpointExistsError):
        async_save(state(), f"{root}/c", platform=platform)


def test_buffers_are_reused(root: str, platform: Platform) -> None:
    seen: set[int] = set()
    original = platform.stager.buffer

    def buffer(nbytes: int) -> Any:
        found = original(nbytes)
        seen.add(found.__array_interface__["data"][0])
        return found

    platform.stager.buffer = buffer  # type: ignore[method-assign]
    for i in range(4):
        async_save({"x": np.ones(1 << 20)}, f"{root}/{i}", platform=platform).result(30)
    assert len(seen) == 1
    assert platform.stager._pool._used == set(), "all were given back"  # type: ignore[attr-defined]


@pytest.mark.parametrize("fails", [False, True])
def test_too_little_memory_for_copies(root: str, gate: Gate, platform: Platform, fails: bool) -> None:
    gate.open.set()
    gate.fails = "/c/" if fails else None
    with pytest.warns(UserWarning, match=r"max_host_bytes=1048576 allows less"):
        handle = async_save(state(3), f"{root}/c", platform=platform, max_host_bytes=1 << 20)
    if fails:
        with pytest.raises(StoreError):
            handle.result(30)
    else:
        handle.result(30)
        assert equal(read(f"{root}/c"), 3)


def test_without_collectives(tmp_path: Path) -> None:
    options = SaveOptions(save_token="t")
    handles = []
    for rank in range(2):
        mine = hyper_ckpt.NumpyPlatform(rank=rank, world_size=2)
        handles.append(async_save(state(rank), tmp_path / "c", platform=mine, use_collectives=False, options=options))
    for handle in handles:
        handle.result(30)
    with pytest.warns(UserWarning, match="different values"):
        assert equal(read(tmp_path / "c"), 0)


def test_all_ranks_publish_in_order_while_they_go_on(root: str) -> None:
    """The main threads use collectives of their own all the while: ours must not get in between."""

    def job(platform: Platform) -> None:
        ranks, handles = platform.ranks, []
        for i in range(4):
            handles.append(async_save(state(i), f"{root}/{i}", platform=platform, timeout=30))
            for n in range(20):
                assert ranks.all_gather_object([i, n, ranks.rank]) == [[i, n, r] for r in range(3)]
        for handle in handles:
            handle.result(30)

    run_world(3, job)
    assert all(equal(read(f"{root}/{i}"), i) for i in range(4))


def test_one_failing_rank_fails_the_save_of_all(root: str, gate: Gate) -> None:
    gate.open.set()
    gate.fails = "/bad/rank-00001"

    def job(platform: Platform) -> list[str]:
        mine = {"x": hyper_ckpt.ShardedTensor([(np.ones((4, 9)), (4 * platform.ranks.rank, 0))], (12, 9))}
        handle = async_save(mine, f"{root}/bad", platform=platform, timeout=30)
        told = [str(handle.exception(30))] if platform.ranks.rank == 2 else []
        try:
            async_save(mine, f"{root}/next", platform=platform, timeout=30)
        except CheckpointError as error:
            told.append(f"{type(error).__name__} {error}")
        async_save(mine, f"{root}/good", platform=platform, timeout=30).result(30)
        return told

    told = run_world(3, job)
    assert [len(t) for t in told] == [1, 1, 2]
    assert all("rank 1" in text and "no space" in text for each in told for text in each)
    assert read(f"{root}/good")["x"].shape == (12, 9)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_failure_is_told_once_and_in_the_same_call_on_every_rank(root: str, gate: Gate, most: int) -> None:
    gate.open.set()
    gate.fails = "/0/rank-"  # one of them writes it all

    def job(platform: Platform) -> list[str]:
        told = []
        options = SaveOptions(max_in_flight=most)
        if platform.ranks.rank == 1:
            time.sleep(0.1)
        for i in range(8):
            try:
                async_save({"x": np.ones(9)}, f"{root}/{i}", platform=platform, timeout=30, options=options)
                told.append("")
            except CheckpointError as error:
                told.append(type(error).__name__)
        hyper_ckpt.save({}, f"{root}/last", platform=platform, timeout=30)
        return told

    first, *others = run_world(3, job)
    assert others == [first] * 2
    assert [i for i, text in enumerate(first) if text] == [most]


class LatePending:
    """A copy that happens when somebody waits for it."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy, self._lock, self._done = copy, threading.Lock(), False

    def wait(self) -> None:
        with self._lock:
            if not self._done:
                self._copy()
                self._done = True


class LateStager(MeshedStager):
    def copy_out(self, shard: LocalShard, buffer: Any) -> Pending:
        return LatePending(lambda: super(LateStager, self).copy_out(shard, buffer).wait())


def late_platform(ranks: Ranks) -> Platform:
    found = meshed_platform(ranks)
    return Platform("meshed", found.ranks, found.tensors, LateStager(found.tensors))


def test_device_copies_are_waited_for_before_anything_is_written(root: str) -> None:
    layout = MeshLayout(Mesh((2,), (0, 1)), (Shard(0),))
    whole = np.arange(40.0).reshape(8, 5)

    def job(platform: Platform) -> None:
        tensor = distribute(whole, layout, platform.ranks.rank, on_device=True)
        handle = async_save({"w": tensor, "v": np.ones(3)}, f"{root}/c", platform=platform, timeout=30)
        handle.wait_staged(30)
        tensor.local.fill(-1)  # type: ignore[union-attr]
        handle.result(30)

    run_world(2, job, platform=late_platform)
    assert np.array_equal(read(f"{root}/c")["w"], whole)


def test_a_load_beside_a_save(root: str, gate: Gate, platform: Platform) -> None:
    gate.open.set()
    save(state(1), f"{root}/a", platform=platform)
    gate.open.clear()
    handle = async_save(state(2), f"{root}/b", platform=platform)
    target = {key: np.copy(value) if key != "step" else 0 for key, value in state(0).items()}
    load(target, f"{root}/a", platform=platform)
    assert equal(target, 1)
    gate.open.set()
    handle.result(30)


def test_ranks_that_do_not_come(root: str) -> None:
    def job(platform: Platform) -> str:
        if platform.ranks.rank == 1:
            return ""
        with pytest.raises(hyper_ckpt.errors.RankTimeoutError) as caught:
            async_save(state(), f"{root}/c", platform=platform, timeout=0.5)
        return str(caught.value)

    assert "rank 1 did not answer" in run_world(2, job)[0]
