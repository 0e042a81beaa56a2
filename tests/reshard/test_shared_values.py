"""Large plain values, and what codecs make of others: read once where reads are shared."""

import threading
import time
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import CorruptCheckpointError
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.world import run_world

LARGE = 200_000
VALUES: dict[str, Any] = {
    "text": "x" * LARGE,
    "numbers": list(range(LARGE // 4)),
    "codec": bytearray(range(256)) * 500,
    "small": 3,
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of a data file's contents."""
    seen, lock, read_into = list[int](), threading.Lock(), MemoryStore.read_into

    def counted(store: MemoryStore, name: str, ranges: Any, buffers: Any) -> None:
        read_into(store, name, ranges, buffers)
        with lock:
            seen.extend(length for start, length in ranges if name.endswith(".safetensors") and start)

    monkeypatch.setattr(MemoryStore, "read_into", counted)
    return seen


def saved_on(world: int) -> str:
    url = f"memory://shared-values/{time.monotonic_ns()}"
    run_world(world, lambda p: hyper_ckpt.save({"v": VALUES, "w": np.arange(6.0)}, url, platform=p, timeout=30))
    return url


def target() -> dict[str, Any]:
    values: dict[str, Any] = {"text": "", "numbers": [0] * (LARGE // 4), "codec": bytearray(), "small": 0}
    return {"v": values, "w": np.zeros(6)}


@pytest.mark.parametrize("world", [2, 3])
def test_each_is_read_by_one_rank(read: list[int], world: int) -> None:
    url = saved_on(2)

    def job(platform: Platform) -> bool:
        into = target()
        hyper_ckpt.load(into, url, platform=platform, timeout=30, share_reads=True)
        return bool(into["v"] == VALUES)

    read.clear()
    assert run_world(world, job) == [True] * world
    shared = sum(n for n in read if n > 50_000)
    read.clear()
    run_world(world, lambda p: hyper_ckpt.load(target(), url, platform=p, share_reads=False, timeout=30))
    assert sum(n for n in read if n > 50_000) == world * shared > 0


def test_what_not_all_want_is_read_by_those_who_do(read: list[int]) -> None:
    url = saved_on(2)

    def job(platform: Platform) -> bool:
        into = target()
        if platform.ranks.rank == 1:
            del into["v"]["text"]
        hyper_ckpt.load(into, url, platform=platform, timeout=30, share_reads=True)
        return all(value == VALUES[name] for name, value in into["v"].items())

    assert run_world(3, job) == [True] * 3


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9])
def test_a_damaged_one_is_everybodys_error(part: float) -> None:
    url = saved_on(1)
    store = MemoryStore(url)
    (name,) = [name for name in store.list() if name.endswith(".safetensors")]
    data = bytearray(store.read(name))
    data[4096 + int((len(data) - 4096) * part)] ^= 1
    store.delete(name)
    sink = store.create(name, len(data))
    sink.write_at(0, data)
    sink.close(sync=False)
    before = target()["v"]["text"]

    def job(platform: Platform) -> Any:
        into = target()
        try:
            hyper_ckpt.load(into, url, platform=platform, timeout=30, share_reads=True)
        except CorruptCheckpointError as error:
            return str(error), into["v"]["text"] == before
        return None

    results = run_world(3, job)
    assert len(set(results)) == 1
    assert results[0] is not None
    assert results[0][1], "no plain value was set"
