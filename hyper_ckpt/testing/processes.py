"""Processes of ranks: started, watched, and ended by their own number only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from hyper_ckpt.testing.child import Job


def free_port() -> int:
    """A port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int, extra: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a rank: ours, what launchers of jobs set, the way to import what we can, then `extra`."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        **(extra or {}),
    }


class RankProcess:
    """One process in a process group of its own; its output goes to an unnamed file."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = ()) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether the process has ended. It stays a zombie, so that its number can't be given to another one."""
        return self.exit_code() is not None

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._process.returncode is not None:
            return self._process.returncode
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def output(self, start: int = 0) -> str:
        """What it has printed, from byte `start`."""
        size = self.output_size()
        return os.pread(self._output.fileno(), max(size - start, 0), start).decode(errors="replace")

    def output_size(self) -> int:
        """Bytes printed so far."""
        return os.fstat(self._output.fileno()).st_size

    def close(self) -> int:
        """Kills what is left of the process and its children; may be called again. Returns the exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing but the zombie is left
                os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._output.close()
        return code


class JobProcess(RankProcess):
    """A process that runs jobs, see `hyper_ckpt.testing.child`."""

    def __init__(self, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            super().__init__(
                [sys.executable, "-m", "hyper_ckpt.testing.child", str(theirs.fileno())], env, [theirs.fileno()]
            )
        self._connection = Connection(ours.detach())
        self._started_at = 0

    def send(self, job: Job) -> None:
        """Starts a job. A process that has died says so by its missing reply."""
        self._started_at = self.output_size()
        with contextlib.suppress(OSError):
            self._connection.send(job)

    def reply(self) -> tuple[str, Any] | None:
        """The reply to the job, ("died", None) if there will be none, or None while it runs."""
        try:
            if self._connection.poll():
                status, value = self._connection.recv()
                return status, value
        except (EOFError, OSError):
            return "died", None
        return ("died", None) if self.ended() and not self._connection.poll() else None

    def job_output(self) -> str:
        """What was printed since the job was sent."""
        return self.output(self._started_at)

    def show_stacks(self) -> None:
        """Makes the process print where its threads are."""
        if not self.ended():
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.1)

    def hang_up(self) -> None:
        """Tells the process that there are no more jobs: it ends."""
        self._connection.close()

    def close(self) -> int:
        self._connection.close()
        return super().close()
