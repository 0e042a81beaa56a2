"""The launcher and the pool: results come back, failures are shown, nothing is left behind."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_ckpt.errors import CheckpointError
from hyper_ckpt.testing.launch import LaunchError, launch
from hyper_ckpt.testing.pool import PoolError, RankPool

JOBS = str(Path(__file__).parent / "rank_jobs.py")


def own_process(rank: int, world_size: int) -> tuple[int, int]:
    """A function of the test module itself, which no process can import by name."""
    return rank, os.getpid()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_launch_returns_results_and_output() -> None:
    results = launch(2, f"{JOBS}:identity", ["x"])
    assert [r.result[:2] + r.result[3:] for r in results] == [(0, 2, "x"), (1, 2, "x")]
    assert [r.exit_code for r in results] == [0, 0]
    assert len({r.result[2] for r in results}) == 2


def test_launch_sets_the_environment() -> None:
    zero, one = (r.result for r in launch(2, f"{JOBS}:environment", env={"FROM_TEST": "yes"}))
    assert (zero["RANK"], one["RANK"]) == ("0", "1")
    assert {**zero, "RANK": ""} == {**one, "RANK": ""}
    assert (zero["WORLD_SIZE"], zero["MASTER_ADDR"], zero["FROM_TEST"]) == ("2", "127.0.0.1", "yes")


def test_launch_runs_a_script() -> None:
    results = launch(2, JOBS, ["--steps", 3])
    assert [r.output for r in results] == [f"script on rank {r} ['--steps', '3']\n" for r in range(2)]


def test_launch_takes_large_results() -> None:
    assert [len(r.result) for r in launch(2, f"{JOBS}:big", [3 << 20])] == [3 << 20] * 2


def test_launch_shows_every_rank_when_one_fails() -> None:
    with pytest.raises(LaunchError, match=r"ranks \[1\]") as caught:
        launch(2, f"{JOBS}:fails_on_one")
    assert "about to fail" in str(caught.value)
    assert "the disk of rank 1 is full" in str(caught.value)
    assert [r.exit_code for r in caught.value.results] == [0, 1]


def test_launch_accepts_what_was_expected() -> None:
    assert launch(2, f"{JOBS}:dies_on_one", expect={1: signal.SIGKILL})[1].output == "last words\n"
    assert launch(2, f"{JOBS}:exits", [3], expect={1: 3})[1].exit_code == 3
    with pytest.raises(LaunchError, match="did not end as expected"):
        launch(2, f"{JOBS}:identity", expect={1: signal.SIGKILL})


def test_launch_kills_its_own_at_the_deadline() -> None:
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"ranks \[0\] had to be killed") as caught:
        launch(2, f"{JOBS}:hangs_on_zero", timeout=2)
    assert time.monotonic() - begin < 10
    assert [r.exit_code for r in caught.value.results] == [-signal.SIGKILL, 0]
    assert "still here" in str(caught.value)


def test_launch_leaves_no_grandchild() -> None:
    pids = [r.result for r in launch(2, f"{JOBS}:leaves_a_child")]
    end = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def test_pool_keeps_its_processes(pool: RankPool) -> None:
    first = pool.run(f"{JOBS}:identity", 1)
    assert [r[:2] for r in first] == [(0, 2), (1, 2)]
    assert [r[2] for r in pool.run(f"{JOBS}:identity")] == [r[2] for r in first]


def test_pool_runs_smaller_worlds_and_functions_of_a_test(pool: RankPool) -> None:
    assert pool.run(f"{JOBS}:identity", world_size=1)[0][:2] == (0, 1)
    assert [rank for rank, pid in pool.run(own_process) if pid != os.getpid()] == [0, 1]
    with pytest.raises(ValueError, match="does not fit"):
        pool.run(own_process, world_size=3)
    with pytest.raises(ValueError, match="top of its module"):
        pool.run(lambda rank, world_size: None)


def test_pool_hands_back_exceptions(pool: RankPool) -> None:
    pids = [r[2] for r in pool.run(f"{JOBS}:identity")]
    with pytest.raises(PoolError, match="the disk of rank 1 is full") as caught:
        pool.run(f"{JOBS}:fails_on_one")
    assert list(caught.value.problems) == [1]
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert "about to fail" in str(caught.value)
    assert [r[2] for r in pool.run(f"{JOBS}:identity")] == pids, "an exception costs no process"


def test_pool_notices_a_death_and_replaces_the_process(pool: RankPool) -> None:
    pids = [r[2] for r in pool.run(f"{JOBS}:identity")]
    begin = time.monotonic()
    with pytest.raises(PoolError, match=r"rank 1 died \(exit code -9\)") as caught:
        pool.run(f"{JOBS}:dies_on_one")
    assert time.monotonic() - begin < 1
    assert "last words" in str(caught.value)
    now = [r[2] for r in pool.run(f"{JOBS}:identity")]
    assert now[0] == pids[0]
    assert now[1] != pids[1]


def test_pool_kills_what_hangs(pool: RankPool) -> None:
    with pytest.raises(PoolError, match="rank 0 did not answer and was killed") as caught:
        pool.run(f"{JOBS}:hangs_on_zero", timeout=1)
    assert "in hangs_on_zero" in str(caught.value), "where it hung is shown"
    assert len(pool.run(f"{JOBS}:identity")) == 2


def test_closing_a_pool_ends_its_processes() -> None:
    with RankPool(2) as pool:
        pids = [r[2] for r in pool.run(f"{JOBS}:identity")]
    assert not any(map(is_running, pids))
