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
    started: list[threading.Thread] = []
    try:
        for helper in helpers:
            started.append(helper)
            helper.start()
    except RuntimeError:  # the system gives no more threads: go on with those there are
        started.pop()
    except BaseException as error:
        failures.append(error)
    try:
        work()
        for helper in started:
            helper.join()
    except BaseException as error:  # an interrupt of this thread: nobody may go on using the caller's memory
        failures.append(error)
        for helper in started:
            if helper.ident is not None:
                helper.join()
    if failures:
        raise failures[0]


class Running:
    """Tasks that run while the caller does something else: `run_all` in a thread of its own, from `start` on.

    Whoever starts it waits for it or stops it before what the tasks work on is given back.
    """

    def __init__(self, tasks: Iterable[Task], threads: int) -> None:
        self._tasks, self._threads = list(tasks), threads
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="hyper-ckpt-ahead", daemon=True)

    def start(self) -> None:
        """Begins; where the system gives no thread, it does all of it."""
        if not self._tasks:
            return
        try:
            self._thread.start()
        except RuntimeError:
            self._run()

    def wait(self) -> None:
        """Returns when all tasks are done.

        Raises:
            BaseException: the first that a task raised.
        """
        try:
            self._join()
        except BaseException:  # an interrupt of this thread: nobody may go on using the caller's memory
            self.stop()
            raise
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Begins no further task, and returns when those that were begun are over. What they raise is lost."""
        self._stopped = True
        self._join()

    def _join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        def unless_stopped(task: Task) -> Task:
            return lambda: None if self._stopped else task()

        try:
            run_all([unless_stopped(task) for task in self._tasks], self._threads)
        except BaseException as error:  # raised in the thread that waits
            self._failure = error
        self._tasks.clear()
