"""One pool of ranks serves all tests of the sample platform."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_ckpt.testing.child import Target
from hyper_ckpt.testing.pool import RankPool
from hyper_ckpt.testing.processes import free_port

SAMPLE_WORLD = str(Path(__file__).parent / "sample_world.py")
World = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def sample_pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture
def world(sample_pool: RankPool) -> World:
    """Calls a function of a test module on each rank of a fresh process group: `world(fn, *args, world_size=4)`."""

    def run(function: Callable[..., Any], *args: Any, world_size: int = 4, timeout: float = 40.0) -> list[Any]:
        job = (free_port(), Target.of(function), args)
        return sample_pool.run(f"{SAMPLE_WORLD}:run", *job, world_size=world_size, timeout=timeout)

    return run
