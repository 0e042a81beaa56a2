"""A few threads that run tasks until all are done or one fails."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable

from hyper_ckpt.engine.latch import Latch

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

    helpers = [Worker(work, f"hyper-ckpt-{i}") for i in range(min(threads, len(queue)) - 1)]
    over = False
    while not over:  # an interrupt (KeyboardInterrupt), wherever it comes, is a failure, and the helpers are waited for
        try:
            if not failures:
                _start(helpers)
            work()
            for helper in helpers:
                helper.finish(failures)
            over = True
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _start(helpers: Iterable[Worker]) -> None:
    """Starts them, or as many as the system gives."""
    with contextlib.suppress(RuntimeError):
        for helper in helpers:
            helper.start()


class Worker(threading.Thread):
    """A thread that is waited for whatever happens to the one that waits.

    Not by `join`: one that was interrupted takes the thread for ended, which it is not (bpo-46726, up to Python 3.12).
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._over = work, Latch()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self._over.set()

    def finish(self, interrupts: list[BaseException]) -> None:
        """Returns when it is over, or if it never began. Interrupts are noted and end nothing before: nobody may go on
        using the caller's memory."""
        begun = self.ident is not None
        while begun:
            try:
                self._over.wait()
                self.join()  # what is left of it must not outlive the interpreter
                return
            except BaseException as error:
                interrupts.append(error)


class Running:
    """Tasks that run while the caller does something else: `run_all` in a thread of its own, from `start` on.

    Whoever starts it waits for it or stops it before what the tasks work on is given back.
    """

    def __init__(self, tasks: Iterable[Task], threads: int) -> None:
        self._tasks, self._threads = list(tasks), threads
        self._failure: BaseException | None = None
        self._stopped = False
        self._interrupts: list[BaseException] = []
        self._thread = Worker(self._run, "hyper-ckpt-ahead")

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
        self._finish()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Begins no further task, and returns when those that were begun are over. What they raise is lost."""
        self._stopped = True
        self._finish()

    def _finish(self) -> None:
        self._thread.finish(self._interrupts)
        if self._interrupts:
            raise self._interrupts.pop()

    def _run(self) -> None:
        def unless_stopped(task: Task) -> Task:
            return lambda: None if self._stopped or self._interrupts else task()

        try:
            run_all([unless_stopped(task) for task in self._tasks], self._threads)
        except BaseException as error:  # raised in the thread that waits
            self._failure = error
        self._tasks.clear()
