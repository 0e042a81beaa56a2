"""Runs train.py as several processes, and reads what they tell."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_ckpt.testing.processes import RankProcess, free_port, rank_environment

TRAIN = Path(__file__).with_name("train.py")
# Names of hosts may lead anywhere; these processes only have to find each other.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
GRACE_SECONDS = 5.0  # for the others to show their own errors when one rank has failed


class RunError(Exception):
    """Processes did not do what they should. `outputs` is what each rank printed."""

    def __init__(self, message: str, outputs: list[str]) -> None:
        super().__init__(message)
        self.outputs = outputs


@dataclass
class Events:
    """What rank 0 of a run has told so far."""

    losses: dict[int, float] = field(default_factory=dict)  # by step
    digests: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by event


class Ranks:
    """The processes of one run of train.py, and their end: when the block is left, none of them is.

    Args:
        world_size: 1 starts it as a plain script, without any process group.
        events: file for what rank 0 tells.
        arguments: for train.py.
        timeout: seconds until the run has failed.
    """

    def __init__(self, world_size: int, events: Path, arguments: list[object], timeout: float) -> None:
        self._world_size, self._path, self._timeout = world_size, events, timeout
        self._command = [sys.executable, str(TRAIN), *map(str, arguments), "--events", str(events)]
        self._ranks: list[RankProcess] = []

    def __enter__(self) -> Ranks:
        self._deadline = time.monotonic() + self._timeout
        port = free_port()
        try:
            for rank in range(self._world_size):
                env = rank_environment(rank, self._world_size, port, LOOPBACK)
                self._ranks.append(RankProcess(self._command, env))
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> list[int]:
        """Sends SIGKILL to every process that is still there. Returns all exit codes, -9 for those."""
        return [rank.close() for rank in self._ranks]

    def wait(self) -> Events:
        """Until all have ended well.

        Raises:
            RunError: one failed, or the time was up.
        """
        self._watch(lambda: all(rank.ended() for rank in self._ranks))
        return self.events()

    def wait_for_step(self, step: int) -> Events:
        """Until `step` is done, everything still running. Raises as `wait` does."""
        self._watch(lambda: any(done >= step for done in self.events().losses))
        return self.events()

    def events(self) -> Events:
        """What has been told so far."""
        found = Events()
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        for event in [json.loads(line) for line in lines if line.endswith("\n")]:
            if event["event"] == "step":
                found.losses[event["step"]] = event["loss"]
            elif event["event"] == "digests":
                found.digests = event["digests"]
            else:
                found.facts[event["event"]] = event
        return found

    def _watch(self, done: Callable[[], bool]) -> None:
        while not self._failed() and not done():
            if time.monotonic() > self._deadline:
                raise self._error(f"not done within {self._timeout:g} s")
            time.sleep(0.05)
        if self._failed():
            end = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < end and not all(rank.ended() for rank in self._ranks):
                time.sleep(0.05)
            codes = {number: rank.exit_code() for number, rank in enumerate(self._ranks)}
            raise self._error(f"exit codes by rank: {codes}")

    def _failed(self) -> bool:
        return any(rank.exit_code() not in (None, 0) for rank in self._ranks)

    def _error(self, message: str) -> RunError:
        return RunError(f"the run {self._path.stem!r} failed: {message}", [rank.output() for rank in self._ranks])
