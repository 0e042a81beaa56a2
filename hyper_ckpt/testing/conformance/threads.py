"""Threads that nobody waits for when the plugin hangs: neither an interrupt nor the end of the process."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

_NAME = "conformance check"
_STACK_LINES = 25


def at_once(calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Runs the calls in threads that start together. Returns what each returned or raised."""
    barrier = threading.Barrier(len(calls))
    results: list[T | Exception] = [RuntimeError("did not run")] * len(calls)

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), name=_NAME, daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def spread(call: Callable[[U], T], items: Iterable[U], workers: int) -> list[T]:
    """What `call` returns for each item, by several threads; raises what the first failing item raised."""
    listed = list(items)
    results: list[T | Exception] = [RuntimeError("did not run")] * len(listed)

    def work(first: int) -> None:
        for number in range(first, len(listed), workers):
            try:
                results[number] = call(listed[number])
            except Exception as error:
                results[number] = error

    at_once([lambda first=first: work(first) for first in range(workers)])  # type: ignore[misc]
    good = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        good.append(result)
    return good


class OutOfTime(Exception):
    """A call did not end in time; the text shows where it is."""


_wait = threading.Thread.join  # a test of what hangs puts its own clock here


def within(seconds: float, call: Callable[[], object]) -> None:
    """Runs `call` in a thread of its own, which is left alone when the time is up.

    Raises:
        OutOfTime: it did not end in time.
        BaseException: what it raised.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    before = {thread.ident for thread in threading.enumerate()}
    thread = threading.Thread(target=run, name=_NAME, daemon=True)
    thread.start()
    _wait(thread, seconds)
    if thread.is_alive():
        stacks = [line for each in _running(before) for line in each[-_STACK_LINES:]]
        raise OutOfTime("\n".join([f"it did not end within {seconds:g} s. It is at:", *stacks]))
    if raised:
        raise raised[0]


def _running(before: set[int | None]) -> list[list[str]]:
    """The stacks of the threads of a check; not of those that only wait for others of them."""
    frames = sys._current_frames()
    stacks = []
    for thread in threading.enumerate():
        if thread.name != _NAME or thread.ident in before or thread.ident not in frames:
            continue
        stack = traceback.extract_stack(frames[thread.ident])
        if not any(frame.filename == __file__ and frame.name == "at_once" for frame in stack):
            stacks.append("".join(traceback.format_list(stack)).splitlines())
    return stacks[:3]
