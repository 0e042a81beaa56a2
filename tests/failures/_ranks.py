"""Runs what must fail, on every rank, and checks that the ranks agree on the error and go on working."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_ckpt import errors, save
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import CheckpointError
from hyper_ckpt.testing.world import run_world

from ._states import flat, loads_whole, part

KNOWN = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, CheckpointError)}


def caught(action: Callable[[], Any]) -> BaseException:
    """What `action` raises; returning is a failure."""
    try:
        result = action()
    except BaseException as error:
        return error
    raise AssertionError(f"nothing was raised; returned {result!r}")


def all_fail(
    world_size: int, action: Callable[[Platform], Any], scratch: Path, *, known: bool = True, timeout: float = 40
) -> CheckpointError:
    """Runs `action(platform)` on every rank of a world, which must raise one error, the same everywhere.

    Then the same platforms save and load at `scratch`: a failure must not cost what comes after.

    Returns:
        The error of rank 0.
    """

    def rank_main(platform: Platform) -> BaseException:
        error = caught(lambda: action(platform))
        # Ranks that are no longer in step would meet in the wrong step here, and fail or hang.
        save(part(7, platform.ranks.rank, world_size), scratch, platform=platform, overwrite=True, durable=False)
        loads_whole(platform, scratch, 7)
        return error

    raised = run_world(world_size, rank_main, timeout=timeout)
    assert len({(type(e), str(e)) for e in raised}) == 1, raised
    if known:
        assert type(raised[0]) in KNOWN, raised[0]
    return raised[0]  # type: ignore[return-value]


def untouched(state: Any, action: Callable[[], Any]) -> Any:
    """Runs `action`, which must raise; the state must be as before, byte for byte."""
    before = flat(state)
    try:
        return action()
    finally:
        assert flat(state) == before, "the target was touched"
