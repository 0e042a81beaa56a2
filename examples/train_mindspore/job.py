"""Runs train.py as two processes, and reads their diaries."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hyper_ckpt.testing.processes import RankProcess, free_port, rank_environment

TRAIN = Path(__file__).with_name("train.py")
RANKS = 2
QUIET = {"GLOG_v": "3"}  # errors of MindSpore only


class JobError(Exception):
    """Processes did not do what they should. `outputs` is what each rank printed."""

    def __init__(self, message: str, outputs: list[str]) -> None:
        super().__init__(message)
        self.outputs = outputs


class Job:
    """The processes of one run of train.py, started when it is made."""

    def __init__(self, diary: Path, arguments: list[object], timeout: float) -> None:
        self._diary, self._timeout = diary, timeout
        self._deadline = time.monotonic() + timeout
        command = [sys.executable, str(TRAIN), *map(str, arguments), "--diary", str(diary)]
        port = free_port()
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(RANKS):
                self._ranks.append(RankProcess(command, rank_environment(rank, RANKS, port, QUIET)))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> list[int]:
        """Sends SIGKILL to every process that is still there. Returns all exit codes, -9 for those."""
        return [rank.close() for rank in self._ranks]

    def wait(self, until: Callable[[], bool] | None = None) -> None:
        """Until something is so, or all have ended well.

        Raises:
            JobError: one has failed, or the time was up.
        """
        while True:
            codes = [rank.exit_code() for rank in self._ranks]
            if any(code not in (None, 0) for code in codes):
                raise self._error(f"exit codes {codes}")
            if None not in codes or (until and until()):
                return
            if time.monotonic() > self._deadline:
                raise self._error(f"not done within {self._timeout:g} s")
            time.sleep(0.005)

    def diary(self, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank has noted so far."""
        path = Path(f"{self._diary}-{rank}.jsonl")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def step(self) -> int:
        """The last step that rank 0 has done."""
        return max((note["step"] for note in self.diary()), default=0)

    def losses(self, rank: int) -> dict[int, float]:
        """The losses of a rank, by step."""
        return {note["step"]: note["loss"] for note in self.diary(rank) if note["event"] == "step"}

    def digests(self, rank: int) -> dict[str, str]:
        """SHA-256 of all that a rank had at the end."""
        return self.diary(rank)[-1]["digests"]

    def _error(self, message: str) -> JobError:
        return JobError(f"the job {self._diary.name!r}: {message}", [rank.output() for rank in self._ranks])


@contextmanager
def job(diary: Path, arguments: list[object], timeout: float) -> Iterator[Job]:
    """A job, of which no process is left at the end."""
    started = Job(diary, arguments, timeout)
    try:
        yield started
    finally:
        started.kill()
