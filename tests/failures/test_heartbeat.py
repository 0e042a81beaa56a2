"""Signs of life: a rank that is dead is told from one that is slow, long before the deadline."""

import threading
import time
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.agreement import heartbeat, operation
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import RankTimeoutError
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.world import run_world


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(operation, "SILENT_SECONDS", 0.5)


def shard(rank: int) -> dict[str, Any]:
    return {"x": hyper_ckpt.ShardedTensor([(np.ones((4, 9)), (4 * rank, 0))], (12, 9))}


def save_with(monkeypatch: pytest.MonkeyPatch, slow: dict[int, float], dead: set[int], timeout: float) -> list[Any]:
    """A save of three ranks, some of which write slowly or stop to give signs of life. What each raised, or None."""
    create, release, url = MemoryStore.create, threading.Event(), f"memory://beat/{time.monotonic_ns()}"

    def slowly(store: Any, name: str, size: int) -> Any:
        rank = int(name[5:10])
        if rank in dead:
            release.wait(30)
        time.sleep(slow.get(rank, 0))
        return create(store, name, size)

    monkeypatch.setattr(MemoryStore, "create", slowly)
    original = heartbeat.beating

    def beating(store: Any, key: str) -> Any:
        if int(key.rpartition("/")[2]) in dead:
            store.set(key, b"0")  # its last one
            return __import__("contextlib").nullcontext()
        return original(store, key)

    monkeypatch.setattr(operation, "beating", beating)

    def job(platform: Platform) -> Any:
        try:
            hyper_ckpt.save(shard(platform.ranks.rank), url, platform=platform, timeout=timeout)
            return None
        except RankTimeoutError as error:
            return error
        finally:
            if platform.ranks.rank == 0:
                release.set()

    return run_world(3, job)


def test_a_dead_rank_is_named_long_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    first, second, _ = save_with(monkeypatch, {1: 1.5}, {2}, 60)
    assert time.monotonic() - begin < 20
    for error in (first, second):
        assert "rank 2 gave no sign of life for 0.5 s" in str(error)
        assert error.ranks == (2,), "rank 1 is only slow"


def test_a_slow_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_with(monkeypatch, {1: 1.5}, set(), 60) == [None] * 3


def test_a_rank_that_is_too_slow_is_said_to_be_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = save_with(monkeypatch, {1: 3.0}, set(), 0.8)
    assert "rank 1 did not answer within 0.8 s, but still at work" in str(first)


def test_beats_are_forgotten() -> None:
    def job(platform: Platform) -> int:
        for i in range(5):
            hyper_ckpt.save(shard(platform.ranks.rank), f"memory://beat/forgotten-{i}", platform=platform, timeout=30)
        platform.ranks.all_gather_object(0)
        numbers = range(next(platform.operations))
        keys = [f"hyper-ckpt/{n}/beat/{r}" for n in numbers for r in range(3)]
        return sum(platform.ranks.key_value_store.get(key) is not None for key in keys)

    assert max(run_world(3, job)) == 0
