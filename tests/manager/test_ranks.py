"""CheckpointManager on several ranks: they agree, without a collective, and only rank 0 removes."""

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import CheckpointManager, PerRank, Retention, SaveInterval, SaveOptions, ShardedTensor
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import CheckpointError, CorruptCheckpointError, RanksDisagreeError
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.world import run_world

WORLD = 3


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name = f"manager-{time.monotonic_ns()}"
    yield str(tmp_path) if request.param == "disk" else f"memory://{name}/run"
    MemoryStore.drop_bucket(name)


def state(rank: int, step: int) -> dict[str, Any]:
    mine = np.full((4, 9), float(step + rank))
    return {"w": ShardedTensor([(mine, (4 * rank, 0))], (4 * WORLD, 9)), "rank": PerRank(rank), "step": step}


def steps_of(root: str) -> list[int]:
    return [info.step for info in CheckpointManager(root, on_sigterm=False).steps() if info.complete]


@pytest.mark.parametrize("most", [1, 3])
def test_a_run(root: str, most: int) -> None:
    options = SaveOptions(max_in_flight=most)

    def job(platform: Platform) -> list[Any]:
        rank = platform.ranks.rank
        interval, retention = SaveInterval(steps=5), Retention(last=2, best=1)
        with CheckpointManager(root, platform=platform, interval=interval, retention=retention) as m:
            assert m.restore(state(rank, 0), timeout=30) is None
            for step in range(1, 42):
                if m.should_save(step):
                    # Only rank 0 knows the loss.
                    metrics = {"loss": abs(step - 11)} if rank == 0 else None
                    m.async_save(step, state(rank, step), metrics=metrics, timeout=30, options=options)
            m.save(42, state(rank, 42), timeout=30)
        target = state(rank, 0)
        with CheckpointManager(root, platform=platform) as m:
            found = m.restore(target, timeout=30)
            assert found is not None
            return [found.step, target["step"], target["rank"].value, target["w"].shards[0][0][0, 0]]

    assert run_world(WORLD, job) == [[42, 42, rank, 42.0 + rank] for rank in range(WORLD)]
    assert steps_of(root) == [10, 40, 42]


def test_all_skip_the_same_damaged_one(tmp_path: Path) -> None:
    def job(platform: Platform) -> Any:
        rank = platform.ranks.rank
        m = CheckpointManager(tmp_path, platform=platform)
        for step in (1, 2, 3):
            m.save(step, state(rank, step), timeout=30)
        if rank == 0:
            for step, pattern in ((3, "rank-00002-*"), (2, "rank-00001-*")):
                file = next((tmp_path / f"step-000000000{step}").glob(pattern))
                file.write_bytes(file.read_bytes()[:-1] + b"?")
        platform.ranks.all_gather_object(None)
        target = state(rank, 0)
        with pytest.raises(CorruptCheckpointError):
            m.restore(target, skip_damaged=False, timeout=30)
        assert target["step"] == 0
        found = m.restore(target, timeout=30)
        assert found is not None
        return found.step, target["step"], found.skipped

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first, *others = run_world(WORLD, job)
    assert others == [first] * 2
    assert first[:2] == (1, 1)
    assert [step for step, _ in first[2]] == [3, 2]
    assert len([w for w in told if "newer ones cannot be" in str(w.message)]) == 1


def test_ranks_that_save_different_steps(root: str) -> None:
    def job(platform: Platform) -> str:
        m = CheckpointManager(root, platform=platform)
        with pytest.raises(RanksDisagreeError) as caught:
            m.save(5 + platform.ranks.rank // 2, state(platform.ranks.rank, 5), timeout=30)
        m.save(7, state(platform.ranks.rank, 7), timeout=30)
        return str(caught.value)

    told = run_world(WORLD, job)
    assert len(set(told)) == 1
    assert "5 on rank 0, 5 on rank 1, 6 on rank 2" in told[0]
    assert steps_of(root) == [7]


def test_metrics_that_rank_zero_cannot_note_fail_on_all(root: str) -> None:
    def job(platform: Platform) -> str:
        rank = platform.ranks.rank
        m = CheckpointManager(root, platform=platform)
        with pytest.raises((ValueError, CheckpointError)) as caught:
            m.save(5, state(rank, 5), metrics={"loss": "low"} if rank == 0 else None, timeout=30)
        m.save(6, state(rank, 6), timeout=30)
        return str(caught.value)

    assert all("'loss' is a str" in text for text in run_world(WORLD, job))


DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("interval", {"interval": SaveInterval(steps=2)}, {"interval": SaveInterval(steps=3)}),
    ("retention", {}, {"retention": Retention(last=3)}),
    ("on_sigterm", {"on_sigterm": True}, {"on_sigterm": False}),
    ("leftover_age", {"leftover_age": 3600.0}, {"leftover_age": None}),
    ("root", {}, {}),
]


@pytest.mark.parametrize(("name", "most", "last"), DIFFERENT, ids=[name for name, *_ in DIFFERENT])
@pytest.mark.parametrize("first", ["restore", "save", "async_save"])
def test_managers_with_different_arguments(
    tmp_path: Path, name: str, most: dict[str, Any], last: dict[str, Any], first: str
) -> None:
    def job(platform: Platform) -> str:
        rank = platform.ranks.rank
        odd = rank == WORLD - 1
        where = tmp_path / ("other" if odd and name == "root" else "run")
        m = CheckpointManager(where, platform=platform, **(last if odd else most))
        # With different intervals, ranks come to different steps: that is not the cause to name.
        step = 2 + (odd and name == "interval")
        arguments = (state(rank, 0),) if first == "restore" else (step, state(rank, 2))
        with pytest.raises(RanksDisagreeError) as caught:
            getattr(m, first)(*arguments, timeout=30)
        return str(caught.value)

    told = run_world(WORLD, job)
    assert len(set(told)) == 1
    assert f"managers were made with different {name}: " in told[0]
    assert " on rank 0 but " in told[0]
    assert f" on rank {WORLD - 1}. Make them with the same arguments" in told[0]
    for value in (*most.values(), *last.values()):
        assert str(value) in told[0]
    assert list(tmp_path.rglob("*.json")) == []


def test_a_step_of_another_type_on_one_rank_fails_on_all(root: str) -> None:
    def job(platform: Platform) -> list[str]:
        rank, told = platform.ranks.rank, []
        m: Any = CheckpointManager(root, platform=platform)
        calls = [
            lambda: m.save("5" if rank == 1 else 5, state(rank, 5), timeout=30),
            lambda: m.save(5, state(rank, 5), metrics=3.0 if rank == 0 else None, timeout=30),
            lambda: m.restore(state(rank, 5), "5" if rank == 1 else 5, timeout=30),
        ]
        for call in calls:
            with pytest.raises(TypeError) as caught:
                call()
            told.append(str(caught.value))
        m.save(6, state(rank, 6), timeout=30)
        return told

    first, *others = run_world(WORLD, job)
    assert others == [first] * 2
    assert "rank 1: step must be an integer from 0 on, not '5'" in first[0]
    assert 'rank 0: metrics must be {"loss": 3.0}, not 3.0' in first[1]
    assert "step must be an integer" in first[2]
    assert steps_of(root) == [6]


def test_a_checkpoint_is_no_root(root: str) -> None:
    def job(platform: Platform) -> str:
        rank = platform.ranks.rank
        CheckpointManager(root, platform=platform).save(1, state(rank, 1), timeout=30)
        m = CheckpointManager(f"{root}/step-0000000001", platform=platform)
        with pytest.raises(ValueError, match="this is a checkpoint: give the folder above it"):
            m.restore(state(rank, 0), timeout=30)
        with pytest.raises(ValueError, match="this is a checkpoint: give the folder above it") as caught:
            m.save(2, state(rank, 2), timeout=30)
        return str(caught.value)

    assert len(set(run_world(WORLD, job))) == 1
    assert steps_of(root) == [1]


@pytest.mark.parametrize("asking", [0, 2])
def test_all_are_told_to_end_at_the_same_step(root: str, asking: int) -> None:
    def job(platform: Platform) -> tuple[list[int], int]:
        rank, saved = platform.ranks.rank, []
        with CheckpointManager(root, platform=platform, interval=SaveInterval(steps=4, lead=1)) as m:
            for step in range(1, 100):
                platform.ranks.all_gather_object(step)
                if rank == asking and step == 6:
                    m.preempt()
                if m.should_save(step):
                    m.async_save(step, state(rank, step), timeout=30)
                    saved.append(step)
                if m.preempted:
                    break
        return saved, step

    first, *others = run_world(WORLD, job)
    assert others == [first] * 2
    saved, step = first
    assert saved == sorted({4, *([8] if step >= 8 else []), step})
    assert 7 <= step <= 9
    assert steps_of(root) == saved


def test_minutes(root: str) -> None:
    """With hardly any minutes between them, every other step is saved, on all ranks the same ones."""

    def job(platform: Platform) -> list[int]:
        saved = []
        with CheckpointManager(root, platform=platform, interval=SaveInterval(minutes=1e-9, lead=1)) as m:
            for step in range(1, 21):
                platform.ranks.all_gather_object(step)
                if m.should_save(step):
                    m.save(step, state(platform.ranks.rank, step), timeout=30, durable=False)
                    saved.append(step)
        return saved

    first, *others = run_world(WORLD, job)
    assert others == [first] * 2
    assert len(first) >= 8
    assert steps_of(root) == first


def test_nobody_can_be_asked_if_ranks_do_not_listen(root: str) -> None:
    def job(platform: Platform) -> None:
        m = CheckpointManager(root, platform=platform, on_sigterm=False)
        with pytest.raises(CheckpointError, match="do not listen: make it with on_sigterm=True"):
            m.preempt()

    run_world(WORLD, job)


def test_a_dead_manager_does_not_disturb_the_next(root: str) -> None:
    """What was asked of one manager does not reach another one of the same root."""

    def job(platform: Platform) -> list[bool]:
        m = CheckpointManager(root, platform=platform, interval=SaveInterval(lead=1))
        m.preempt()
        for step in range(4):
            platform.ranks.all_gather_object(step)
            m.should_save(step)
        assert m.preempted
        platform.ranks.all_gather_object(None)
        other = CheckpointManager(root, platform=platform, interval=SaveInterval(lead=1))
        return [other.should_save(step) for step in range(4)] + [other.preempted]

    assert run_world(WORLD, job) == [[False] * 5] * WORLD


def test_only_rank_zero_changes_what_is_there(root: str) -> None:
    def job(platform: Platform) -> None:
        rank = platform.ranks.rank
        m = CheckpointManager(root, platform=platform)
        for step in (1, 2, 3):
            m.save(step, state(rank, step), timeout=30)
        platform.ranks.all_gather_object(None)
        m.delete(2)  # on every rank
        if rank == 0:
            m.pin(1)  # or on this one
        platform.ranks.all_gather_object(None)
        assert [(i.step, i.pinned) for i in m.steps()] == [(1, True), (3, False)]
        assert m.latest() == 3

    run_world(WORLD, job)
    assert hyper_ckpt.verify(f"{root}/step-0000000003").ok
