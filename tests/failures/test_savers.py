"""Several savers, and readers, at one path; and commits of which only the last step fails."""

import errno
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_ckpt import LoadOptions, load, read, save, verify
from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointReplacedError,
    MissingFileError,
    StoreError,
)
from hyper_ckpt.storage.syscalls import store_error
from hyper_ckpt.testing.faults import Operation, WrapperStore
from hyper_ckpt.testing.world import run_world

from ._ranks import all_fail
from ._states import assert_holds, assert_no_leftovers, files_in, loads_whole, part, same, target
from ._stores import Hooked, through

WORLD = 3


def in_threads(*actions: Callable[[], Any]) -> list[Any]:
    """Runs all at once. Returns results, or what was raised."""
    outcomes: list[Any] = [None] * len(actions)

    def run(number: int) -> None:
        try:
            outcomes[number] = actions[number]()
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    return outcomes


def meeting(path: Path, gate: threading.Barrier) -> str:
    """A URL whose store waits before it publishes the manifest until the other saver wants to, too."""

    def hook(kind: str, name: str) -> None:
        if kind == "publish" and name == "manifest.json":
            gate.wait(20)

    return through(path, lambda s: Hooked(s, hook))


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_savers_one_wins(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "ckpt"
    for _ in range(5):
        if overwrite:
            save(part(1), path, no_dist=True, overwrite=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
        url = meeting(path, threading.Barrier(2))
        outcomes = in_threads(
            *(
                lambda step=step, url=url: save(part(step), url, platform=NumpyPlatform(), overwrite=overwrite)
                for step in (2, 3)
            )
        )
        lost = [o for o in outcomes if isinstance(o, BaseException)]
        assert [type(e) for e in lost] == [CheckpointReplacedError], outcomes
        assert "Give every job its own path" in str(lost[0])
        assert_holds(path, 2 if lost[0] is outcomes[1] else 3)
        assert_no_leftovers(path)


def test_two_worlds_save_to_one_path(tmp_path: Path) -> None:
    path, gate = tmp_path / "ckpt", threading.Barrier(2)
    run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))

    def world(step: int) -> list[Any]:
        def rank_main(platform: Platform) -> None:
            rank = platform.ranks.rank
            where = meeting(path, gate) if rank == 0 else path
            save(part(step, rank, WORLD), where, platform=platform, overwrite=True)

        return run_world(WORLD, rank_main, return_exceptions=True)

    outcomes = in_threads(lambda: world(2), lambda: world(3))
    lost = next(o for o in outcomes if isinstance(o[0], BaseException))
    assert {type(e) for e in lost} == {CheckpointReplacedError}
    assert len({str(e) for e in lost}) == 1
    assert_holds(path, 3 if lost is outcomes[0] else 2)
    assert_no_leftovers(path)


def test_a_save_that_is_replaced_at_once_still_removes_what_it_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(part(1), path, no_dist=True)

    class Overtaken(WrapperStore):
        def after(self, operation: Operation, result: object) -> None:
            if (operation.kind, operation.name) == ("publish", "manifest.json"):
                save(part(3), path, no_dist=True, overwrite=True)

    save(part(2), through(path, Overtaken), no_dist=True, overwrite=True)
    assert_holds(path, 3)
    assert_no_leftovers(path)


def test_a_saver_without_overwrite_loses_to_one_that_was_faster(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"

    def hook(kind: str, name: str) -> None:
        if kind == "close":
            save(part(2), path, platform=NumpyPlatform())

    with pytest.raises(CheckpointReplacedError):
        save({"a": np.ones(3)}, through(path, lambda s: Hooked(s, hook)), no_dist=True)
    assert_holds(path, 2)
    assert_no_leftovers(path)
    with pytest.raises(CheckpointExistsError):
        save({"a": 1}, path, no_dist=True)


def test_readers_get_old_or_new_whole_while_savers_overwrite(tmp_path: Path) -> None:
    path, done = tmp_path / "ckpt", threading.Event()
    save(part(1), path, no_dist=True, durable=False)
    counts = {"saves": 0, "loads": 0, "reads": 0, "verifies": 0}
    end = time.monotonic() + 6

    def saver() -> None:
        step = 1
        while time.monotonic() < end:
            step += 1
            save(part(step), path, platform=NumpyPlatform(), overwrite=True, durable=False)
            counts["saves"] += 1
        done.set()

    def loader() -> None:
        while not done.is_set():
            into = target()
            load(into, path, platform=NumpyPlatform())
            assert same(into, part(into["step"]))
            counts["loads"] += 1

    def reader() -> None:
        while not done.is_set():
            found = read(path)
            assert same(found["model"], {**found["model"], "wide": part(found["step"])["model"]["wide"]})
            counts["reads"] += 1

    def verifier() -> None:
        while not done.is_set():
            report = verify(path)
            assert report.ok, report.problems
            counts["verifies"] += 1

    assert in_threads(saver, loader, reader, verifier) == [None] * 4
    assert min(counts.values()) > 3, counts
    assert_no_leftovers(path)


@pytest.mark.parametrize("batch", [1 << 16, 1 << 26])
@pytest.mark.parametrize("on", range(WORLD))
def test_a_shared_load_begins_again_when_the_checkpoint_is_replaced(tmp_path: Path, on: int, batch: int) -> None:
    """On every rank, and what the first attempt said must not stop the second one."""
    path, states = tmp_path / "ckpt", [{f"w{i}": np.full((200, 100), s + i) for i in range(5)} for s in (0.0, 100.0)]
    save(states[0], path, no_dist=True)
    replaced = threading.Lock()

    class Replacing(WrapperStore):
        def before(self, operation: Operation, part: Any) -> None:
            if operation.kind == "read" and operation.offset > 0 and replaced.acquire(blocking=False):
                save(states[1], path, platform=NumpyPlatform(), overwrite=True)

    def rank_main(platform: Platform) -> int:
        where = through(path, Replacing) if platform.ranks.rank == on else path
        into = {name: np.zeros_like(value) for name, value in states[0].items()}
        options = LoadOptions(broadcast_batch_bytes=batch)
        report = load(into, where, platform=platform, timeout=20, options=options, threads=1)
        assert same(into, states[1])
        assert len(report.loaded) == 5
        return report.bytes_read

    assert sum(run_world(WORLD, rank_main)) > 0
    assert replaced.locked()


def test_a_file_that_is_gone_for_good_is_no_replacement(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(part(1), path, no_dist=True)
    next(path.glob("rank-*")).unlink()
    for call in (lambda: load(target(), path, no_dist=True), lambda: read(path)):
        with pytest.raises(MissingFileError):
            call()
    assert not verify(path).ok


# ------------------------------------------------------------------ after the commit point


class LosesTheSync(WrapperStore):
    """The manifest gets into its place, but the directory cannot be synced; or the answer is lost on the way."""

    def publish(self, name: str, data: bytes, expect: Any, *, sync: bool) -> str:
        etag = super().publish(name, data, expect, sync=sync)
        if name == "manifest.json":
            raise store_error("syncing", f"{self.url}", OSError(errno.EIO, "Input/output error"))
        return etag


class LosesItAndCannotLook(LosesTheSync):
    def __init__(self, inner: ByteStore) -> None:
        super().__init__(inner)
        self._lost = False

    def publish(self, name: str, data: bytes, expect: Any, *, sync: bool) -> str:
        try:
            return super().publish(name, data, expect, sync=sync)
        except StoreError:
            self._lost = True
            raise

    def before(self, operation: Operation, part: Any) -> None:
        if self._lost and operation.kind in ("stat", "read"):
            raise StoreError("the server is gone")


@pytest.mark.parametrize("store", [LosesTheSync, LosesItAndCannotLook])
@pytest.mark.parametrize("world_size", [1, WORLD])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_fails_after_the_commit_point_removes_nothing(
    tmp_path: Path, world_size: int, overwrite: bool, store: Any
) -> None:
    """The checkpoint is in place and whole; after a power failure the old one might be back: it stays, too."""
    path = tmp_path / "ckpt"
    if overwrite:
        run_world(world_size, lambda p: save(part(1, p.ranks.rank, world_size), path, platform=p))
    old = files_in(path) if overwrite else set()

    def run(platform: Platform) -> None:
        rank = platform.ranks.rank
        where = through(path, store) if rank == 0 else path
        save(part(2, rank, world_size), where, platform=platform, overwrite=True)

    error = all_fail(world_size, run, tmp_path / "scratch")
    assert type(error) is StoreError
    assert "power failure" in str(error)
    assert "Input/output" in str(error)
    assert_holds(path, 2)
    assert old - {"manifest.json"} <= files_in(path)
    run_world(world_size, lambda p: loads_whole(p, path, 2))


def test_a_failed_publish_before_the_commit_point_removes_its_files(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(part(1), path, no_dist=True)

    def hook(kind: str, name: str) -> None:
        if kind == "publish" and name == "manifest.json":
            raise StoreError("no")

    with pytest.raises(CheckpointError, match=r"^no$"):
        save(part(2), through(path, lambda s: Hooked(s, hook)), no_dist=True, overwrite=True)
    assert_holds(path, 1)
    assert_no_leftovers(path)


def test_files_of_a_replaced_checkpoint_that_cannot_be_removed(tmp_path: Path) -> None:
    """That is no failure of the save: a later one removes them."""
    path = tmp_path / "ckpt"
    save(part(1), path, no_dist=True)

    def hook(kind: str, name: str) -> None:
        if kind == "delete":
            raise StoreError("busy")

    save(part(2), through(path, lambda s: Hooked(s, hook)), no_dist=True, overwrite=True)
    assert_holds(path, 2)
