"""A few threads that run tasks until all are done or one fails."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable

Task = Callable[[], None]


def default_threads() -> int:
    """Threads for I/O unless told otherwise: one per usable processor, 2 to 8."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return min(max(usable, 2), 8)


def run_all(tasks: Iterable[Task], threads: int) -> None:
    """Runs every task on up to `threads` threads, the caller's among them.

    Raises:
        BaseException: the first that a task raised; no new task was started after it.
    """
    queue = deque(tasks)
    failures: list[BaseException] = []

    def work() -> None:
        while not failures:
            try:
                task = queue.popleft()
            except IndexError:
                return
            try:
                task()
            except BaseException as error:  # whatever it was, it is raised in the caller's thread
                failures.append(error)

    helpers = [
        threading.Thread(target=work, name=f"hyper-ckpt-{i}", daemon=True) for i in range(min(threads, len(queue)) - 1)
    ]
    for helper in helpers:
        helper.start()
    try:
        work()
        for helper in helpers:
            helper.join()
    except BaseException as error:  # an interrupt of this thread: nobody may go on using the caller's memory
        failures.append(error)
        for helper in helpers:
            helper.join()
    if failures:
        raise failures[0]
