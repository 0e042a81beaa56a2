"""One rank fails, anywhere: all raise the same error in time, it names rank and cause, and nothing is left behind."""

import errno
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_ckpt import (
    FileSystemWriter,
    LoadOptions,
    ShardedTensor,
    StandardLoadPlanner,
    StandardSavePlanner,
    load,
    save,
)
from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.contracts.platform import KeyValueStore, Platform, Ranks
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.errors import CheckpointError, RankFailedError, StoreError, UnsupportedTypeError
from hyper_ckpt.key_value import InProcessKeyValueStore
from hyper_ckpt.storage.syscalls import store_error
from hyper_ckpt.testing.faults import FaultyStore, Operation
from hyper_ckpt.testing.world import run_world

from ._ranks import all_fail, caught
from ._states import assert_holds, assert_no_leftovers, files_in, loads_whole, part
from ._stores import Hooked, through

WORLD = 3


def full_disk(name: str) -> CheckpointError:
    return store_error("writing", name, OSError(errno.ENOSPC, "No space left on device"))


def faulty(rank: int, on: int, matches: Callable[[Operation], bool], error: Callable[[str], Exception]) -> Any:
    """A store that fails on one rank, for the operations that match; the real one elsewhere."""

    def wrap(inner: ByteStore) -> ByteStore:
        if rank != on:
            return inner
        return FaultyStore(inner, lambda op: error(op.name) if matches(op) else None)

    return wrap


def is_data(op: Operation, kind: str) -> bool:
    return op.kind == kind and op.name.endswith(".safetensors")


class Planner(StandardSavePlanner):
    """Raises in one of its methods."""

    def __init__(self, method: str | None) -> None:
        super().__init__()
        if method:
            setattr(self, method, self._fail)

    def _fail(self, *_: Any) -> Any:
        raise ZeroDivisionError("the plan is broken")


class Writer(FileSystemWriter):
    def place(self, columns: Any, save_id: str) -> Any:
        raise ZeroDivisionError("the placement is broken")

    def at(self, checkpoint_id: str) -> "Writer":
        return Writer(checkpoint_id)

    def identity(self) -> str:
        return "FileSystemWriter"


# What happens, on which rank, and which text must be in everybody's error.
STORE_FAULTS: dict[str, tuple[int, Callable[[Operation], bool], str]] = {
    "creating a file": (2, lambda op: is_data(op, "create"), "rank-00002-.*No space"),
    "writing the header": (2, lambda op: is_data(op, "write_at") and not op.offset, "rank-00002-.*No space"),
    "writing data": (2, lambda op: is_data(op, "write_at") and op.offset > 0, "rank-00002-.*No space"),
    "completing a file": (2, lambda op: is_data(op, "close"), "rank-00002-.*No space"),
    "publishing the receipt": (2, lambda op: op.kind == "publish", "receipts/rank-00002-.*No space"),
    "syncing": (2, lambda op: op.kind == "sync", "No space"),
    "looking at the path": (0, lambda op: op.kind == "stat", "No space"),
    "writing on rank 0": (0, lambda op: is_data(op, "write_at") and op.offset > 0, "rank-00000-.*No space"),
    "publishing": (0, lambda op: op.kind == "publish" and op.name == "manifest.json", r"manifest\.json.*No space"),
}


def fails_and_leaves_nothing(
    tmp_path: Path, overwrite: bool, run: Callable[[Platform, Path], Any], scratch: Path
) -> CheckpointError:
    """Runs a save that must fail on all ranks, onto a new path or over an earlier checkpoint."""
    path = tmp_path / "ckpt"
    if overwrite:
        run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))
    begin = time.monotonic()
    error = all_fail(WORLD, lambda p: run(p, path), scratch)
    assert time.monotonic() - begin < 20, "nobody waited for the deadline"
    if overwrite:
        assert_holds(path, 1)
        assert_no_leftovers(path)
    else:
        assert not files_in(path)
    return error


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", STORE_FAULTS)
def test_a_store_that_fails_on_one_rank(tmp_path: Path, name: str, overwrite: bool) -> None:
    on, matches, text = STORE_FAULTS[name]

    def run(platform: Platform, path: Path) -> None:
        rank = platform.ranks.rank
        url = through(path, faulty(rank, on, matches, full_disk))
        save(part(2, rank, WORLD), url, platform=platform, overwrite=True, timeout=30)

    error = fails_and_leaves_nothing(tmp_path, overwrite, run, tmp_path / "scratch")
    assert type(error) is StoreError
    assert f"rank {on}" in str(error)
    with pytest.raises(StoreError, match=f"(?s){text}.*Free some space"):
        raise error


def test_a_full_disk_in_the_second_writer_thread(tmp_path: Path) -> None:
    fired = []

    def fail(op: Operation) -> Exception | None:
        if not is_data(op, "write_at"):
            return None
        if threading.current_thread().name.startswith("hyper-ckpt-"):
            fired.append(op)
            return full_disk(op.name)
        time.sleep(0.02)  # lets the other threads have a part
        return None

    def run(platform: Platform, path: Path) -> None:
        rank = platform.ranks.rank
        url = through(path, (lambda s: FaultyStore(s, fail)) if rank == 2 else (lambda s: s))
        state = {"x": ShardedTensor([(np.ones((4 << 20,)), ((4 << 20) * rank,))], (3 * (4 << 20),))}
        save(state, url, platform=platform, threads=3)

    error = fails_and_leaves_nothing(tmp_path, False, run, tmp_path / "scratch")
    assert fired
    assert type(error) is StoreError
    assert "rank 2" in str(error)
    assert "rank-00002-" in str(error)


@pytest.mark.parametrize(("on", "method"), [
    (2, "build_local_plan"), (2, "finalize_plan"), (2, "get_data"), (0, "loose_plan"), (0, "build_global_plan"),
    (0, "finalize_plan"),
])  # fmt: skip
def test_a_planner_that_fails_on_one_rank(tmp_path: Path, on: int, method: str) -> None:
    def run(platform: Platform, path: Path) -> None:
        rank = platform.ranks.rank
        save(part(2, rank, WORLD), path, platform=platform, planner=Planner(method if rank == on else None))

    error = fails_and_leaves_nothing(tmp_path, False, run, tmp_path / "scratch")
    assert type(error) is RankFailedError
    assert error.ranks == (on,)
    assert f"rank {on}: ZeroDivisionError: the plan is broken" in str(error)


def test_a_writer_that_fails_on_one_rank(tmp_path: Path) -> None:
    def run(platform: Platform, path: Path) -> None:
        writer = Writer() if platform.ranks.rank == 2 else FileSystemWriter()
        save(part(2, platform.ranks.rank, WORLD), path, platform=platform, storage_writer=writer)

    error = fails_and_leaves_nothing(tmp_path, True, lambda p, path: run(p, path.with_name("new")), tmp_path / "s")
    assert "rank 2: ZeroDivisionError: the placement is broken" in str(error)
    assert not files_in(tmp_path / "new")


def test_a_state_that_one_rank_cannot_save(tmp_path: Path) -> None:
    def run(platform: Platform, path: Path) -> None:
        rank = platform.ranks.rank
        save({**part(2, rank, WORLD), **({"odd": object()} if rank == 2 else {})}, path, platform=platform)

    error = fails_and_leaves_nothing(tmp_path, False, run, tmp_path / "scratch")
    assert type(error) is UnsupportedTypeError
    assert "rank 2" in str(error)
    assert "'odd'" in str(error)


@pytest.mark.parametrize("kind", [KeyError, MemoryError, OSError, AssertionError])
def test_whatever_a_store_raises_is_reported(tmp_path: Path, kind: type[Exception]) -> None:
    def run(platform: Platform, path: Path) -> None:
        rank = platform.ranks.rank
        url = through(path, faulty(rank, 1, lambda op: is_data(op, "close"), lambda name: kind(f"odd {name}")))
        save(part(2, rank, WORLD), url, platform=platform)

    error = fails_and_leaves_nothing(tmp_path, True, lambda p, path: run(p, path.with_name("new")), tmp_path / "s")
    assert type(error) is RankFailedError
    assert kind.__name__ in str(error)
    assert "rank-00001-" in str(error)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("on", [0, 2])
def test_a_rank_that_is_interrupted_stays_interrupted(tmp_path: Path, kind: type[BaseException], on: int) -> None:
    """Ctrl-C must not become an error that somebody catches; the others are told at once."""
    path = tmp_path / "ckpt"

    def stop(op_kind: str, name: str) -> None:
        if op_kind == "close":
            raise kind

    def rank_main(platform: Platform) -> BaseException:
        rank = platform.ranks.rank
        url = through(path, (lambda s: Hooked(s, stop)) if rank == on else (lambda s: s))
        return caught(lambda: save(part(2, rank, WORLD), url, platform=platform))

    begin = time.monotonic()
    errors = run_world(WORLD, rank_main)
    assert time.monotonic() - begin < 20
    assert type(errors[on]) is kind
    others = [e for rank, e in enumerate(errors) if rank != on]
    assert {type(e) for e in others} == {RankFailedError}
    assert all(e.ranks == (on,) and kind.__name__ in str(e) for e in others)
    assert not files_in(path)


# ---------------------------------------------------------------------------------------------- loads


def replicated(step: int) -> dict[str, Any]:
    """A state that every rank wants whole: its reads are shared. No values besides, which are read earlier."""
    rng = np.random.default_rng(step)
    return {f"w{i}": rng.standard_normal((200, 100)) for i in range(6)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "ckpt"
    run_world(WORLD, lambda p: save(replicated(1), path, platform=p))
    return path


@pytest.mark.parametrize("on", range(WORLD))
@pytest.mark.parametrize(("batch", "nth"), [(1 << 16, 1), (1 << 16, 2), (1 << 16, 4), (1 << 26, 1), (1 << 26, 2)])
def test_reading_fails_on_one_rank_of_a_shared_load(
    shared: Path, tmp_path: Path, on: int, nth: int, batch: int
) -> None:
    """Whatever batch it is, and whether the rank is its group's first one or not."""

    def refused(platform: Platform) -> None:
        rank, seen = platform.ranks.rank, iter(range(1, 10**6))

        def matches(op: Operation) -> bool:
            return is_data(op, "read") and op.offset > 0 and next(seen) >= nth

        url = through(shared, faulty(rank, on, matches, lambda name: StoreError(f"reading {name}: the cable is out")))
        options = LoadOptions(broadcast_batch_bytes=batch)
        load(replicated(9), url, platform=platform, timeout=30, threads=1, options=options)

    begin = time.monotonic()
    error = all_fail(WORLD, refused, tmp_path / "scratch")
    assert time.monotonic() - begin < 15, "nobody waited for the deadline"
    assert type(error) is StoreError
    assert f"rank {on}" in str(error)
    assert "cable" in str(error)


class Loads(StandardLoadPlanner):
    def __init__(self, method: str | None) -> None:
        if method:
            setattr(self, method, Planner._fail.__get__(self))


@pytest.mark.parametrize("on", [0, 2])
@pytest.mark.parametrize("method", ["build_local_plan", "build_global_plan", "acquire_tensor", "apply_tensor"])
def test_a_load_planner_that_fails_on_one_rank(shared: Path, tmp_path: Path, on: int, method: str) -> None:
    def refused(platform: Platform) -> None:
        planner = Loads(method if platform.ranks.rank == on else None)
        load(replicated(9), shared, platform=platform, planner=planner, timeout=30)

    error = all_fail(WORLD, refused, tmp_path / "scratch")
    assert type(error) is RankFailedError
    assert error.ranks == (on,)
    assert "ZeroDivisionError: the plan is broken" in str(error)


def test_the_manifest_cannot_be_read_on_rank_0(shared: Path, tmp_path: Path) -> None:
    def refused(platform: Platform) -> None:
        fault = faulty(platform.ranks.rank, 0, lambda op: op.name == "manifest.json", lambda n: StoreError(f"no {n}"))
        load(replicated(9), through(shared, fault), platform=platform, timeout=30)

    error = all_fail(WORLD, refused, tmp_path / "scratch")
    assert type(error) is StoreError
    assert "rank 0" in str(error)


class Slow(InProcessKeyValueStore):
    """A rank that is slow to see verdicts."""

    def __init__(self, inner: KeyValueStore, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds
        self.set_many, self.delete, self.delete_prefix = inner.set_many, inner.delete, inner.delete_prefix  # type: ignore[method-assign]

    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        if any(key.count("/") == 2 for key in keys):  # hyper-ckpt/operation/step: a verdict
            time.sleep(self._seconds)
        return self._inner.get_many(keys, timeout)


def test_a_verdict_stays_until_every_rank_has_read_it(tmp_path: Path) -> None:
    """A rank fails so soon after a step that another one hasn't yet looked how that step ended."""

    def slow_rank_1(ranks: Ranks) -> Platform:
        if ranks.rank == 1:
            ranks._key_value_store = Slow(ranks.key_value_store, 0.3)  # type: ignore[attr-defined]
        return NumpyPlatform(ranks)

    def rank_main(platform: Platform) -> BaseException:
        rank = platform.ranks.rank
        url = through(tmp_path / "ckpt", faulty(rank, 2, lambda op: op.kind == "publish", full_disk))
        state = {"w": np.ones(3), "mine": rank}
        return caught(lambda: save(state, url, platform=platform, timeout=8, threads=1))

    begin = time.monotonic()
    with pytest.warns(UserWarning, match="mine"):
        errors = run_world(WORLD, rank_main, platform=slow_rank_1)
    assert {type(e) for e in errors} == {StoreError}, errors
    assert time.monotonic() - begin < 7


def test_text_that_cannot_be_sent_is_escaped(tmp_path: Path) -> None:
    def refused(platform: Platform) -> None:
        rank = platform.ranks.rank
        url = through(tmp_path / "c", faulty(rank, 2, lambda op: op.kind == "create", lambda n: StoreError("\udcff")))
        save(part(1, rank, WORLD), url, platform=platform, timeout=20)

    assert "\\udcff" in str(all_fail(WORLD, refused, tmp_path / "scratch"))
    odd = tmp_path / "odd-\udcff"
    run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), odd, platform=p))
    run_world(2, lambda p: loads_whole(p, odd, 1))
