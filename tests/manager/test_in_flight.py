"""CheckpointManager in one process: saves in flight, and signals; with the threads and handlers that belong to them."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hyper_ckpt
from hyper_ckpt import CheckpointManager, NumpyPlatform, Retention
from hyper_ckpt.errors import (
    CheckpointError,
    PlatformError,
    SaveInFlightError,
    StoreError,
)
from hyper_ckpt.storage.memory_store import MemoryStore

from ._runs import complete, fill, manager, state


class Slow:
    """Writes that wait until they are let through, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.fails = threading.Event(), False
        create = MemoryStore.create

        def held(store: MemoryStore, name: str, size: int) -> Any:
            self.open.wait(30)
            if self.fails:
                raise StoreError(f"{name}: no space")
            return create(store, name, size)

        monkeypatch.setattr(MemoryStore, "create", held)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


@pytest.fixture
def memory() -> Iterator[str]:
    name = f"manager-{time.monotonic_ns()}"
    yield f"memory://{name}"
    MemoryStore.drop_bucket(name)


def test_in_flight(memory: str, slow: Slow) -> None:
    m = manager(memory)
    handle = m.async_save(1, state(1))
    assert m.should_save(1) is False
    assert m.latest() is None
    with pytest.raises(SaveInFlightError, match="step 1 is being saved"):
        m.delete(1)
    m.pin(1)
    slow.open.set()
    m.close()
    assert handle.done()
    assert [(i.step, i.pinned) for i in m.steps()] == [(1, True)]
    m.close()
    for call in (m.save, m.async_save):
        with pytest.raises(CheckpointError, match="this manager is closed"):
            call(2, state(2))


def test_a_step_that_is_saved_anew_is_not_removed_meanwhile(memory: str, slow: Slow) -> None:
    """It is superseded, and rank 0 tidies up after an earlier save just when the new one begins."""
    slow.open.set()
    fill(memory, 10, 40)
    m = manager(memory, retention=Retention(last=1))
    with m._starting(10):
        m._keeper.tidy(40)
    assert complete(m) == [10, 40]
    m._keeper.tidy(40)
    assert complete(m) == [40]


def test_close_raises_what_failed(memory: str, slow: Slow) -> None:
    slow.fails = True
    slow.open.set()
    m = manager(memory)
    m.async_save(1, state(1))
    with pytest.raises(StoreError, match="no space"):
        m.close()
    m.close()

    def interrupted(m: CheckpointManager) -> None:
        with m:
            m.async_save(1, state(1))
            raise KeyError("mine")

    m = manager(memory)
    with pytest.raises(KeyError):
        interrupted(m)
    with pytest.raises(StoreError):  # told by the next save of the platform
        manager(memory, platform=m._platform).save(1, state(1))
    with manager(memory) as m:
        handle = m.async_save(1, state(1))
        assert handle.exception() is not None  # told: close need not
    m = manager(memory)
    m.async_save(1, state(1))
    with pytest.raises(StoreError, match="no space"):
        m.async_save(2, state(2))
    m.close()


def test_callbacks_of_a_handle(memory: str, slow: Slow, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[BaseException | None] = []

    def broken(_: BaseException | None) -> None:
        raise ZeroDivisionError

    handle = hyper_ckpt.async_save(state(), f"{memory}/a", platform=NumpyPlatform())
    handle.add_done_callback(broken)
    handle.add_done_callback(told.append)
    assert not told
    slow.open.set()
    handle.result(30)
    handle.add_done_callback(told.append)
    deadline = time.monotonic() + 30
    while len(told) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert told == [None, None]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_ranks_that_cannot_talk(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=r"rank 1 of 2 has no process group.*use_collectives=False"):
        CheckpointManager(tmp_path, platform=NumpyPlatform(rank=1, world_size=2))
    with pytest.raises(ValueError, match="needs ranks that talk"):
        manager(tmp_path).save(1, state(), use_collectives=False)


def handler() -> Any:
    return signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("order", [lambda ms: ms, lambda ms: ms[::-1]], ids=["first first", "last first"])
def test_no_handler_is_left_behind(tmp_path: Path, order: Callable[[Any], Any]) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, mine := lambda number, _: heard.append(number))
    try:
        ms = [manager(tmp_path / str(i), on_sigterm=True) for i in range(2)]
        assert handler() is not mine
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM], "what was there before is called"
        for m in order(ms):
            assert handler() is not mine
            assert m.should_save(1)
            assert m.preempted
            m.close()
        assert handler() is mine
        manager(tmp_path)
        assert handler() is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_above_ours_stays(tmp_path: Path) -> None:
    before = handler()
    try:
        m = manager(tmp_path, on_sigterm=True)
        ours, heard = handler(), list[int]()
        signal.signal(signal.SIGTERM, above := lambda number, frame: (heard.append(number), ours(number, frame)))
        m.close()
        assert handler() is above
        with manager(tmp_path, on_sigterm=True) as again:
            os.kill(os.getpid(), signal.SIGTERM)
            assert again.should_save(1)
        assert len(heard) == 1
        assert handler() is above
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_manager_that_nobody_has_does_not_listen(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, mine := lambda number, _: heard.append(number))
    try:
        m = manager(tmp_path, on_sigterm=True)
        del m
        gc.collect()
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(heard) == 1
        with manager(tmp_path, on_sigterm=True):
            pass
        assert handler() is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_one_asks_by_hand(tmp_path: Path) -> None:
    before, made = handler(), []
    thread = threading.Thread(target=lambda: made.append(manager(tmp_path, on_sigterm=True)))
    thread.start()
    thread.join()
    assert handler() is before
    made[0].preempt()
    assert made[0].should_save(7)
    assert made[0].preempted
