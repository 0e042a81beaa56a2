"""Ranks that never come, come late, hang or die: named on all others after the timeout, and nothing is lost."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_ckpt import SaveOptions, load, save
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import RankTimeoutError
from hyper_ckpt.testing.faults import FaultyStore, Operation
from hyper_ckpt.testing.world import run_world

from ._ranks import caught
from ._states import assert_holds, assert_no_leftovers, files_in, loads_whole, part, same, target
from ._stores import Hooked, through

WORLD = 3
# Ranks wait `timeout` for the others, and a little longer for rank 0, who may just be about to tell.
TIMEOUT, LATE, LONGEST = 1.0, 3.5, 10.0


def call(kind: str, platform: Platform, path: Path, step: int = 1) -> None:
    rank = platform.ranks.rank
    if kind == "save":
        save(part(step, rank, WORLD), path, platform=platform, timeout=TIMEOUT, overwrite=True)
    else:
        load(target(rank, WORLD), path, platform=platform, timeout=TIMEOUT)


def meets_again(platform: Platform, path: Path) -> None:
    save(
        part(9, platform.ranks.rank, WORLD),
        path,
        platform=platform,
        overwrite=True,
        options=SaveOptions(leftover_age=0),
    )
    loads_whole(platform, path, 9)


@pytest.mark.parametrize("kind", ["save", "load"])
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_calls(tmp_path: Path, kind: str, absent: int) -> None:
    path = tmp_path / "ckpt"
    run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))
    before = files_in(path)

    def rank_main(platform: Platform) -> tuple[BaseException, float] | None:
        if platform.ranks.rank == absent:
            return None
        begin = time.monotonic()
        return caught(lambda: call(kind, platform, path, 2)), time.monotonic() - begin

    found = [each for each in run_world(WORLD, rank_main) if each]
    assert {type(error) for error, _ in found} == {RankTimeoutError}
    assert {error.ranks for error, _ in found} == {(absent,)}
    assert len({str(error) for error, _ in found}) == 1
    assert all(f"rank {absent}" in str(e) and "log" in str(e) and "timeout=" in str(e) for e, _ in found)
    assert all(TIMEOUT <= seconds < LONGEST for _, seconds in found)
    assert files_in(path) == before
    assert_holds(path, 1)


@pytest.mark.parametrize("kind", ["save", "load"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_when_the_others_have_given_up(tmp_path: Path, kind: str, late: int) -> None:
    """It gets the error, too, and enters no collective; the next operation of all works."""
    path = tmp_path / "ckpt"
    run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))
    gate = threading.Barrier(WORLD)

    def rank_main(platform: Platform) -> BaseException:
        if platform.ranks.rank == late:
            time.sleep(LATE)
        error = caught(lambda: call(kind, platform, path))
        gate.wait(20)
        meets_again(platform, path)
        return error

    errors = run_world(WORLD, rank_main)
    assert {type(e) for e in errors} == {RankTimeoutError}, errors
    assert {e.ranks for e in errors} == {(late,)}, errors
    assert_no_leftovers(path)


def test_a_late_rank_leaves_the_whole_timeout_to_the_others(tmp_path: Path) -> None:
    """Waiting for a rank does not use up the time that the work may take."""
    path, timeout = tmp_path / "ckpt", 2.5

    def rank_main(platform: Platform) -> None:
        rank = platform.ranks.rank
        if rank == 1:
            time.sleep(0.7 * timeout)
        slow = through(
            path, lambda s: Hooked(s, lambda kind, _: time.sleep(0.6 * timeout) if kind == "close" else None)
        )
        save(part(1, rank, WORLD), slow if rank == 1 else path, platform=platform, timeout=timeout)

    run_world(WORLD, rank_main)
    assert_holds(path, 1)


class Blocked:
    """A store whose rank hangs at one operation until it is released."""

    def __init__(self, kind: str, name: str = "", *, after: bool = False) -> None:
        self.kind, self.name, self.after = kind, name, after
        self.reached, self.release = threading.Event(), threading.Event()

    def wrap(self, inner: Any) -> Hooked:
        return Hooked(inner, self._hook, after=self.after)

    def _hook(self, kind: str, name: str) -> None:
        if kind == self.kind and name.endswith(self.name) and not self.reached.is_set():
            self.reached.set()
            assert self.release.wait(30)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rank_that_hangs_while_it_writes(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "ckpt"
    if overwrite:
        run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))
    before = files_in(path) if overwrite else set()
    blocked, gate = Blocked("write_at", ".safetensors"), threading.Barrier(WORLD - 1)

    def rank_main(platform: Platform) -> BaseException:
        rank = platform.ranks.rank
        url = through(path, blocked.wrap if rank == 2 else lambda s: s)
        error = caught(
            lambda: save(part(2, rank, WORLD), url, platform=platform, timeout=TIMEOUT, overwrite=True, threads=1)
        )
        if rank != 2:
            gate.wait(20)
            blocked.release.set()
        meets_again(platform, tmp_path / "next")
        return error

    errors = run_world(WORLD, rank_main)
    assert blocked.reached.is_set()
    assert {type(e) for e in errors} == {RankTimeoutError}
    assert {e.ranks for e in errors} == {(2,)}
    assert len({str(e) for e in errors}) == 1
    assert files_in(path) == before, "also the late rank took its files away"
    if overwrite:
        assert_holds(path, 1)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_rank_0_hangs_around_the_commit_point(tmp_path: Path, after: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The others give up, and look: where it is published they return. Else it may still be: their files must stay."""
    path = tmp_path / "ckpt"
    run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))
    blocked, gate = Blocked("publish", "manifest.json", after=after), threading.Barrier(WORLD - 1)
    there = []

    def rank_main(platform: Platform) -> BaseException | None:
        rank = platform.ranks.rank
        url = through(path, blocked.wrap if rank == 0 else lambda s: s)
        try:
            save(part(2, rank, WORLD), url, platform=platform, timeout=TIMEOUT, overwrite=True)
            error = None
        except RankTimeoutError as raised:
            error = raised
        if rank != 0:
            assert gate.wait(20) >= 0
            if rank == 1:
                there.append(assert_holds(path, 1, 2))  # what a job that is restarted now would load
            gate.wait(20)
            blocked.release.set()
        meets_again(platform, tmp_path / "next")
        return error

    errors = run_world(WORLD, rank_main)
    assert there == [2 if after else 1]
    assert errors[0] is None
    if after:
        assert errors[1:] == [None, None]
    else:
        assert {e.ranks for e in errors[1:]} == {(0,)}
        assert all("not published when looked at" in str(e) for e in errors[1:])
    assert "ranks 1, 2 gave up waiting" in caplog.text, "rank 0 tells who was late"
    assert_holds(path, 2)
    assert_no_leftovers(path)


def test_rank_0_publishes_nothing_once_the_others_have_given_up(tmp_path: Path) -> None:
    """It hangs while it looks at what they wrote."""
    path = tmp_path / "ckpt"
    run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))
    gate, looked = threading.Barrier(WORLD - 1), threading.Event()
    release = threading.Event()

    def hook(kind: str, name: str) -> None:
        if kind == "stat" and name.startswith("receipts/rank-00001"):
            looked.set()
            assert release.wait(30)

    def rank_main(platform: Platform) -> BaseException:
        rank = platform.ranks.rank
        url = through(path, (lambda s: Hooked(s, hook)) if rank == 0 else lambda s: s)
        error = caught(lambda: save(part(2, rank, WORLD), url, platform=platform, timeout=TIMEOUT, overwrite=True))
        if rank != 0:
            gate.wait(20)
            release.set()
        meets_again(platform, tmp_path / "next")
        return error

    errors = run_world(WORLD, rank_main)
    assert looked.is_set()
    assert {type(e) for e in errors} == {RankTimeoutError}
    assert [e.ranks for e in errors] == [(1, 2), (0,), (0,)]
    assert_holds(path, 1)


def test_rank_0_is_so_slow_that_the_others_give_up_before_it_counts(tmp_path: Path) -> None:
    """Then it must not publish: some may have begun something else."""
    path = tmp_path / "ckpt"
    run_world(WORLD, lambda p: save(part(1, p.ranks.rank, WORLD), path, platform=p))
    blocked, gate = Blocked("close", ".safetensors"), threading.Barrier(WORLD - 1)

    def rank_main(platform: Platform) -> BaseException:
        rank = platform.ranks.rank
        url = through(path, blocked.wrap if rank == 0 else lambda s: s)
        error = caught(lambda: save(part(2, rank, WORLD), url, platform=platform, timeout=TIMEOUT, overwrite=True))
        if rank != 0:
            gate.wait(20)
            blocked.release.set()
        meets_again(platform, tmp_path / "next")
        return error

    errors = run_world(WORLD, rank_main)
    assert {type(e) for e in errors} == {RankTimeoutError}
    assert {e.ranks for e in errors} == {(0,)}
    assert_holds(path, 1)
    run_world(WORLD, lambda p: meets_again(p, path))
    assert_no_leftovers(path)


@pytest.mark.parametrize("on", [0, 1])
def test_a_rank_that_hangs_while_it_reads(tmp_path: Path, on: int) -> None:
    """The others wait for it before a broadcast, not inside: they can give up."""
    path = tmp_path / "ckpt"
    state = {f"w{i}": np.full((300, 300), float(i)) for i in range(4)}
    run_world(WORLD, lambda p: save(state, path, platform=p))
    blocked, gate = Blocked("read", ".safetensors"), threading.Barrier(WORLD - 1)

    def wrap(inner: Any) -> Any:
        def block(op: Operation) -> None:
            if op.offset > 0:  # behind the headers
                blocked._hook(op.kind, op.name)

        return FaultyStore(inner, block)

    def rank_main(platform: Platform) -> BaseException:
        rank = platform.ranks.rank
        url = through(path, wrap if rank == on else lambda s: s)
        into = {name: np.zeros_like(value) for name, value in state.items()}
        error = caught(lambda: load(into, url, platform=platform, timeout=TIMEOUT, threads=1))
        if rank != on:
            gate.wait(20)
            blocked.release.set()
        load(into, path, platform=platform)
        assert same(into, state)
        return error

    errors = run_world(WORLD, rank_main)
    assert blocked.reached.is_set()
    assert {type(e) for e in errors} == {RankTimeoutError}, errors
    assert {e.ranks for e in errors} == {(on,)}, errors


@pytest.mark.parametrize("skipper", [0, 1, 2])
def test_a_rank_that_skipped_a_call_finds_back(tmp_path: Path, skipper: int) -> None:
    """Its own code failed before the call: one save fails, for all; the next ones do not."""

    def train(platform: Platform) -> list[str]:
        outcomes = []
        for step in range(5):
            if step == 1 and platform.ranks.rank == skipper:
                outcomes.append("skipped")
            else:
                try:
                    save({"step": step}, tmp_path / f"step-{step}", platform=platform, timeout=1.0, durable=False)
                    outcomes.append("saved")
                except RankTimeoutError as error:
                    outcomes.append(f"failed for {error.ranks}")
            platform.ranks.all_gather_object(step)  # the training keeps the ranks together
        return outcomes

    for rank, outcomes in enumerate(run_world(3, train)):
        second = "skipped" if rank == skipper else f"failed for {(skipper,)}"
        assert outcomes == ["saved", second, "saved", "saved", "saved"]
