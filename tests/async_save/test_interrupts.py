"""Ctrl-C at every line of an asynchronous save, and threads that do not start: the platform stays usable."""

import contextlib
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from hyper_ckpt import NumpyPlatform, SaveHandle, SaveOptions, async_save, read, save
from hyper_ckpt.api import handle as api_handle
from hyper_ckpt.api.common import in_flight
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.engine import in_flight as engine_in_flight
from hyper_ckpt.engine import latch, snapshot, workers
from hyper_ckpt.storage.memory_store import MemoryStore

MODULES = (sys.modules[async_save.__module__], api_handle, engine_in_flight, latch, snapshot, workers)
FILES = {module.__file__ for module in MODULES}
STATE = {name: np.zeros(500) for name in "abcd"}
_paths = (f"memory://interrupts/{i}" for i in itertools.count())


@pytest.fixture(autouse=True)
def _bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(snapshot, "_BATCH_BYTES", 4000)  # several tasks, for several threads
    yield
    MemoryStore.drop_bucket("interrupts")


@contextlib.contextmanager
def interrupt_at(number: int) -> Iterator[list[str]]:
    """Raises KeyboardInterrupt before a line of `FILES` that this thread runs, counted from 1. Gives the lines run."""
    lines: list[str] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            lines.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            if len(lines) == number:
                sys.settrace(None)
                raise KeyboardInterrupt(lines[-1])
        return trace

    before = sys.gettrace()
    gc.disable()  # what it finds is no part of this
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
        gc.enable()


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def try_everywhere(act: Callable[[Platform], object], prepare: Callable[[Platform], object]) -> tuple[int, list[str]]:
    """Interrupts `act` where it comes to a line for the first time and for the last, each time on a new platform, which
    must then save.

    Returns:
        How many interrupts were tried, and where the platform was not usable.
    """
    bad: list[str] = []
    platforms: list[Platform] = []  # none is freed in the next attempt
    tried = 0
    for number in _first_and_last(act, prepare):
        platforms.append(platform := NumpyPlatform())
        prepare(platform)
        with interrupt_at(number) as lines, contextlib.suppress(KeyboardInterrupt):
            act(platform)
        tried += len(lines) == number
        if (problem := problem_of(platform)) is not None:
            bad.append(f"{lines[-1]}: {problem}")
    return tried, bad


def _first_and_last(act: Callable[[Platform], object], prepare: Callable[[Platform], object]) -> list[int]:
    platform = NumpyPlatform()
    prepare(platform)
    with interrupt_at(0) as lines:
        act(platform)
    numbered = [*enumerate(lines, 1)]
    last = {line: number for number, line in numbered}
    first = {line: number for number, line in reversed(numbered)}
    return sorted({*first.values(), *last.values()})


def problem_of(platform: Platform) -> str | None:
    """Why the platform is not usable, if it is not."""
    path = next(_paths)
    try:
        in_flight(platform).wait_room(1, 10)
        save({"x": np.arange(3)}, path, platform=platform, timeout=10)
        async_save({"x": np.arange(4)}, path, platform=platform, overwrite=True, timeout=10).result(10)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None if len(read(path)["x"]) == 4 else "not saved"


def saved_async(platform: Platform) -> SaveHandle:
    options = SaveOptions(max_in_flight=2)
    return async_save(STATE, next(_paths), platform=platform, timeout=10, threads=3, options=options)


PREPARED: dict[str, Callable[[Platform], object]] = {
    "first save": lambda _: None,
    "idle thread": lambda platform: saved_async(platform).result(10),
    "one in flight": saved_async,
}


@pytest.mark.parametrize("prepare", PREPARED)
def test_an_interrupt_at_every_line_of_a_save(prepare: str, record_property: Callable[[str, object], None]) -> None:
    tried, bad = try_everywhere(saved_async, PREPARED[prepare])
    record_property("interrupts", f"{tried} tried, {tried - len(bad)} usable")
    print(f"{prepare}: {tried} tried, {tried - len(bad)} usable")
    assert not bad
    assert tried > 100


def test_an_interrupt_at_every_line_of_waiting(record_property: Callable[[str, object], None]) -> None:
    """Also the handle that was waited for can be waited for again."""
    handles: list[SaveHandle] = []

    def wait(platform: Platform) -> None:
        handles.append(saved_async(platform))
        handles[-1].wait_staged()
        handles[-1].add_done_callback(lambda _: None)
        handles[-1].result()

    tried, bad = try_everywhere(wait, lambda _: None)
    record_property("interrupts", f"{tried} tried, {tried - len(bad)} usable")
    assert not bad
    for handle in handles:
        handle.result(10)


@pytest.mark.parametrize("closing", [False, True])
def test_an_interrupt_at_every_line_where_no_thread_starts(
    monkeypatch: pytest.MonkeyPatch, closing: bool, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)

    def prepare(platform: Platform) -> None:
        if closing:
            in_flight(platform).drain()

    tried, bad = try_everywhere(saved_async, prepare)
    record_property("interrupts", f"{tried} tried, {tried - len(bad)} usable")
    assert not bad
    assert tried > 100


@pytest.mark.parametrize("threads", [False, True])
def test_an_interrupt_at_every_line_of_draining(
    monkeypatch: pytest.MonkeyPatch, threads: bool, record_property: Callable[[str, object], None]
) -> None:
    """With saves that nobody has begun to finish, as an earlier interrupt leaves them."""
    if not threads:
        monkeypatch.setattr(threading.Thread, "start", no_thread)

    def prepare(platform: Platform) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine_in_flight.InFlight, "_see_to_it", lambda _: None)
            saved_async(platform)
            saved_async(platform)

    tried, bad = try_everywhere(lambda platform: in_flight(platform).drain(), prepare)
    record_property("interrupts", f"{tried} tried, {tried - len(bad)} usable")
    assert not bad
    assert tried > 10


# ------------------------------------------------------------------ threads that do not start


@pytest.mark.parametrize("begun", [False, True], ids=["before it runs", "when it runs"])
@pytest.mark.parametrize("number", range(1, 6))
def test_an_interrupt_in_the_start_of_a_thread(monkeypatch: pytest.MonkeyPatch, number: int, begun: bool) -> None:
    start, count, platform = threading.Thread.start, itertools.count(1), NumpyPlatform()

    def interrupted(thread: threading.Thread) -> None:
        now = next(count) if threading.current_thread() is threading.main_thread() else 0
        if now != number or begun:
            start(thread)
        if now == number:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        for _ in range(2):
            saved_async(platform)
    assert next(count) > number, "no thread of this number was started"
    assert problem_of(platform) is None


@pytest.mark.parametrize("after", range(5))
def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The system gives a few, or none."""
    start, count, platform = threading.Thread.start, itertools.count(), NumpyPlatform()
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: start(thread) if next(count) < after else no_thread(thread)
    )
    assert saved_async(platform).result(20) is not None
    assert problem_of(platform) is None
    monkeypatch.undo()
    assert problem_of(platform) is None
