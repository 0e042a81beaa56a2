"""Shared reads: a batch is read while the one before is passed on."""

import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import LoadOptions, LoadReport
from hyper_ckpt.agreement import Operation
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.engine.shared import SharedPart
from hyper_ckpt.engine.workers import Running
from hyper_ckpt.errors import DigestError, MemoryBudgetError
from hyper_ckpt.receipt import BLOCK_BYTES
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.world import run_world

BATCH = 1 << 20
STATE = {f"w{i}": np.random.default_rng(i).random(BATCH // 8) for i in range(6)}


@pytest.fixture
def url() -> str:
    url = f"memory://ahead/{time.monotonic_ns()}"
    hyper_ckpt.save(STATE, url, no_dist=True)
    return url


def load_on(world: int, url: str, **arguments: Any) -> list[LoadReport]:
    def job(platform: Platform) -> LoadReport:
        target = {name: np.zeros_like(value) for name, value in STATE.items()}
        report = hyper_ckpt.load(
            target,
            url,
            platform=platform,
            timeout=20,
            share_reads=True,
            options=LoadOptions(broadcast_batch_bytes=BATCH),
            **arguments,
        )
        assert all(np.array_equal(target[name], value) for name, value in STATE.items())
        return report

    return run_world(world, job)


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What each rank did, by its thread: an "r" where it began to read a batch, an "x" where it passed one on."""
    seen: dict[int, str] = defaultdict(str)
    begin, exchange = Running.__init__, SharedPart.exchange

    def beginning(running: Running, tasks: Any, threads: int) -> None:
        seen[threading.get_ident()] += "r"
        begin(running, tasks, threads)

    def exchanging(part: SharedPart, group: object) -> None:
        if part.reader == 0:
            seen[threading.get_ident()] += "x"
        exchange(part, group)

    monkeypatch.setattr(Running, "__init__", beginning)
    monkeypatch.setattr(SharedPart, "exchange", exchanging)
    return seen


def test_the_next_batch_is_read_meanwhile(url: str, story: dict[int, str]) -> None:
    load_on(2, url)
    assert list(story.values()) == ["rrxrxrxrxrxx"] * 2


def test_not_where_memory_is_short(url: str, story: dict[int, str]) -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        load_on(2, url, max_host_bytes=1)
    least = int(str(refused.value).partition(" needs ")[2].partition(" ")[0])
    reports = load_on(2, url, max_host_bytes=least)
    assert max(r.peak_host_bytes for r in reports) <= least
    assert list(story.values()) == ["rxrxrxrxrxrx"] * 2


@pytest.mark.parametrize("at", range(6))
def test_damage_in_any_batch_ends_it_for_all(url: str, at: int) -> None:
    store = MemoryStore(url)
    (name,) = [name for name in store.list() if name.endswith(".safetensors")]
    data = bytearray(store.read(name))
    data[len(data) - BATCH * 6 + at * BATCH + BLOCK_BYTES + 5] ^= 1
    store.delete(name)
    sink = store.create(name, len(data))
    sink.write_at(0, data)
    sink.close(sync=False)
    threads = threading.active_count()
    with pytest.raises(DigestError, match=f"w{at}"):
        load_on(3, url)
    assert threading.active_count() <= threads, "nothing goes on reading behind an error"


@pytest.mark.parametrize("most", [0, 1, 2])
def test_where_the_system_gives_no_threads(url: str, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    start, given = threading.Thread.start, [0]

    def refused(thread: threading.Thread) -> None:
        reads = thread.name.startswith("hyper-ckpt-")
        if reads and given[0] >= most:
            raise RuntimeError("can't start new thread")
        given[0] += reads
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    load_on(2, url, threads=4)


def test_an_interrupt_ends_what_is_read_ahead(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()

    def interrupted(operation: Operation, batch: str, group: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Operation, "batch_ready", interrupted)
    with pytest.raises(BaseException, match=r"KeyboardInterrupt|interrupt|rank"):
        load_on(2, url)
    assert not [t.name for t in threading.enumerate() if t.name == "hyper-ckpt-ahead"]
    assert threading.active_count() <= threads
