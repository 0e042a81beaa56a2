"""A pool of processes that stay: many tests on real ranks, one start."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from hyper_ckpt.testing.child import Failure, Job, Target
from hyper_ckpt.testing.processes import JobProcess, free_port, rank_environment
from hyper_ckpt.testing.time_scale import scaled

# How long the others may go on after a rank has failed: enough to raise an error of their own.
GRACE_SECONDS = scaled(5.0)
_POLL_SECONDS = 0.002


class PoolError(AssertionError):
    """Ranks of a pool raised, died, or did not answer in time.

    `problems` says so per rank, `failures` has the exceptions of those that raised; the first one is
    the cause of this error.
    """

    def __init__(self, problems: Mapping[int, str], failures: Mapping[int, Failure]) -> None:
        super().__init__("\n".join(f"--- rank {rank} {text}" for rank, text in sorted(problems.items())))
        self.problems = dict(problems)
        self.failures = dict(failures)


class RankPool:
    """Processes numbered from 0 that run one function after another. Started when first needed.

    A process that died or hung is replaced before the next run; the others keep what they imported.

    Args:
        size: the largest world.
        env: more environment variables for all of them.
    """

    def __init__(self, size: int, *, env: Mapping[str, str] | None = None) -> None:
        self.size = size
        self._env = dict(env or {})
        self._processes: dict[int, JobProcess] = {}

    def run(
        self,
        function: str | Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float = 60.0,
    ) -> list[Any]:
        """Calls `function(rank, world_size, *args)` on ranks 0..world_size-1 (default: all).

        Args:
            function: "module:function", "file.py:function", or a function of a module's top level.
            timeout: seconds until all must have answered, on a quiet machine (see `time_scale`).

        Returns:
            What each rank returned.

        Raises:
            PoolError: see there. Ranks that have not answered soon after a first failure are killed.
        """
        world_size = self.size if world_size is None else world_size
        if not 0 < world_size <= self.size:
            raise ValueError(f"a world of {world_size} does not fit a pool of {self.size}")
        target = Target.of(function)
        self._start(world_size)
        for rank in range(world_size):
            self._processes[rank].send(Job(target, rank, world_size, args))
        replies = self._collect(world_size, time.monotonic() + scaled(timeout))
        if any(replies.get(rank, ("hung", None))[0] != "ok" for rank in range(world_size)):
            raise self._error(replies, world_size)
        return [pickle.loads(replies[rank][1]) for rank in range(world_size)]

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            process.hang_up()
        end = time.monotonic() + 2.0
        while time.monotonic() < end and not all(process.ended() for process in self._processes.values()):
            time.sleep(_POLL_SECONDS)
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, world_size: int) -> None:
        port = free_port()
        for rank in range(world_size):
            if rank in self._processes and self._processes[rank].ended():
                self._processes.pop(rank).close()
            if rank not in self._processes:
                self._processes[rank] = JobProcess(rank_environment(rank, self.size, port, self._env))

    def _collect(self, world_size: int, deadline: float) -> dict[int, tuple[str, Any]]:
        """The replies in order of arrival, those that came in time."""
        replies: dict[int, tuple[str, Any]] = {}
        while len(replies) < world_size and time.monotonic() < deadline:
            for rank in set(range(world_size)) - set(replies):
                reply = self._processes[rank].reply()
                if reply is None:
                    continue
                replies[rank] = reply
                if reply[0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)
        return replies

    def _error(self, replies: Mapping[int, tuple[str, Any]], world_size: int) -> PoolError:
        problems: dict[int, str] = {}
        failures: dict[int, Failure] = {}
        for rank, (status, value) in replies.items():
            if status == "error":
                failures[rank] = value
        for rank in range(world_size):
            status = replies.get(rank, ("hung", None))[0]
            if status == "ok":
                continue
            if status == "hung":
                self._processes[rank].show_stacks()
            output = self._processes[rank].job_output()
            if status != "error":
                code = self._processes.pop(rank).close()
                status = f"died (exit code {code})" if status == "died" else "did not answer and was killed"
            problems[rank] = f"{status}:\n{output}"
        error = PoolError(problems, failures)
        error.__cause__ = next((f.exception() for f in failures.values()), None)
        return error
