"""One pool of gloo ranks serves all tests: torch is imported once per process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_ckpt.testing.child import Target
from hyper_ckpt.testing.pool import RankPool

GLOO_WORLD = str(Path(__file__).parent / "gloo_world.py")
Gloo = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(6) as pool:
        yield pool


@pytest.fixture
def gloo(pool: RankPool, tmp_path: Path) -> Gloo:
    """Calls a function of a test module on each rank of a fresh gloo world: `gloo(fn, *args, world_size=4)`."""
    numbers = iter(range(1000))

    def run(function: Callable[..., Any], *args: Any, world_size: int = 4, timeout: float = 55.0) -> list[Any]:
        store = str(tmp_path / f"store-{next(numbers)}")
        target = Target.of(function)
        return pool.run(f"{GLOO_WORLD}:run", store, target, args, world_size=world_size, timeout=timeout)

    return run
