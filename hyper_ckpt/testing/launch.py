"""Runs a function or a script as N processes, once."""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_ckpt.testing.child import Job, Target
from hyper_ckpt.testing.processes import JobProcess, RankProcess, free_port, rank_environment
from hyper_ckpt.testing.time_scale import scaled

# How long the others may go on after a rank has failed: enough to raise an error of their own.
GRACE_SECONDS = scaled(5.0)


@dataclass(frozen=True)
class RankResult:
    """How one process ended. `exit_code` is negative for a signal; `result` is what a function returned."""

    rank: int
    exit_code: int
    output: str
    result: Any = None


class LaunchError(AssertionError):
    """Processes did not end as expected. The message shows what every rank printed."""

    def __init__(self, message: str, results: Sequence[RankResult] = ()) -> None:
        shown = [f"--- rank {r.rank} (exit code {r.exit_code}) ---\n{r.output}" for r in results]
        super().__init__("\n".join([message, *shown]))
        self.results = tuple(results)


def launch(
    world_size: int,
    target: str | Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    expect: Mapping[int, int | signal.Signals] | None = None,
) -> list[RankResult]:
    """Starts `world_size` processes and waits for them.

    Every process finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. When this
    returns or raises, none of them is left.

    Args:
        target: "module:function", "file.py:function" or a module's function, called as
            `function(rank, world_size, *args)`; or the path of a script, which gets `args` as its arguments.
        timeout: seconds until all must have ended, on a quiet machine (see `time_scale`).
        env: more environment variables.
        expect: exit code or signal of the ranks that are to end otherwise than with 0.

    Raises:
        LaunchError: a rank ended otherwise than expected, or not in time.
    """
    expected = {rank: _exit_code(code) for rank, code in (expect or {}).items()}
    port = free_port()
    with contextlib.ExitStack() as stack:
        runs: list[_Run] = []
        for rank in range(world_size):
            runs.append(_start(target, args, rank, world_size, rank_environment(rank, world_size, port, env)))
            stack.callback(runs[-1].process.close)
        late = _watch(runs, expected, time.monotonic() + scaled(timeout))
        results = [run.finish() for run in runs]
    if late:
        raise LaunchError(
            f"ranks {late} had to be killed: they did not end within {scaled(timeout)} s, or after a failure", results
        )
    wrong = [r.rank for r in results if r.exit_code != expected.get(r.rank, 0)]
    if wrong:
        raise LaunchError(f"ranks {wrong} did not end as expected", results)
    return results


def _exit_code(code: int | signal.Signals) -> int:
    return -code if isinstance(code, signal.Signals) else code


@dataclass
class _Run:
    """A started rank and the reply of its function, once there is one."""

    rank: int
    process: RankProcess
    reply: tuple[str, Any] | None = None

    def poll(self) -> bool:
        """Takes the reply, if there is one. Returns whether the process has ended."""
        if isinstance(self.process, JobProcess) and self.reply is None:
            self.reply = self.process.reply()
            if self.reply is not None:
                self.process.hang_up()
        return self.process.ended()

    def finish(self) -> RankResult:
        if isinstance(self.process, JobProcess):
            self.process.show_stacks()
        output = self.process.output()
        code = self.process.close()
        result = pickle.loads(self.reply[1]) if self.reply and self.reply[0] == "ok" else None
        return RankResult(self.rank, code, output, result)


def _start(
    target: str | Callable[..., Any], args: Sequence[Any], rank: int, world_size: int, env: Mapping[str, str]
) -> _Run:
    if isinstance(target, str) and target.endswith(".py"):
        return _Run(rank, RankProcess([sys.executable, target, *map(str, args)], env))
    process = JobProcess(env)
    process.send(Job(Target.of(target), rank, world_size, tuple(args)))
    return _Run(rank, process)


def _watch(runs: Sequence[_Run], expected: Mapping[int, int], deadline: float) -> list[int]:
    """Waits until all have ended, not long after a first one that wasn't to fail. Returns the ranks still running."""
    while True:
        running = [run.rank for run in runs if not run.poll()]
        if not running or time.monotonic() >= deadline:
            return running
        if any(run.process.exit_code() not in (None, expected.get(run.rank, 0)) for run in runs):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.01)
