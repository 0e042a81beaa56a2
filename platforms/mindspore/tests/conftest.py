"""One pool of MindSpore ranks serves all tests: the world is joined once, smaller worlds are groups of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_ckpt.testing.child import Target
from hyper_ckpt.testing.pool import PoolError, RankPool
from hyper_ckpt.testing.processes import free_port

MCCL_WORLD = str(Path(__file__).parent / "mccl_world.py")
SIZE = 4
Mccl = Callable[..., list[Any]]
# Read once, when MindSpore is imported: nothing but its fatal errors.
os.environ.setdefault("GLOG_v", "4")


class Worlds:
    """The pool, and the port of the world that its processes have joined.

    Args:
        size: number of processes, the largest world.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._pool = RankPool(size, env={"GLOG_v": "4"})
        self._port = free_port()

    def run(
        self, function: Callable[..., Any], *args: Any, world_size: int | None = None, timeout: float = 40.0
    ) -> list[Any]:
        """Calls `function(rank, world_size, *args)` on each rank of a world of MindSpore."""
        target, world_size = Target.of(function), world_size or self._size
        try:
            results = self._pool.run(
                f"{MCCL_WORLD}:run", self._port, world_size, target, args, world_size=self._size, timeout=timeout
            )
        except PoolError:
            # A world that has lost a rank, or is out of step, can't be mended: the next test starts a new one.
            self.close()
            self._port = free_port()
            raise
        return results[:world_size]

    def close(self) -> None:
        self._pool.close()


def nothing(rank: int, world_size: int) -> None:
    """What a world does to be there when the first test needs it."""


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    worlds.run(nothing, timeout=55.0)
    yield worlds
    worlds.close()


@pytest.fixture
def mccl(worlds: Worlds) -> Mccl:
    """`mccl(fn, *args, world_size=4)`"""
    return worlds.run


@pytest.fixture
def doomed() -> Iterator[Worlds]:
    """A world of two, for tests that break it."""
    worlds = Worlds(2)
    worlds.run(nothing, timeout=55.0)
    yield worlds
    worlds.close()
