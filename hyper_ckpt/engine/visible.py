"""Whether what all ranks wrote can be seen from one rank, as it must be before a checkpoint is published."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.engine.workers import Task, run_all
from hyper_ckpt.errors import MissingFileError, StoreError

LOOK_SECONDS = 90.0
"""How long objects are looked for that other ranks wrote. A client of a network file system may take what it
remembers of a directory for true for up to a minute."""
FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0
"""Seconds between two looks: at first, and at most."""
_NAMES_PER_TASK = 256


@dataclass(frozen=True)
class Expected:
    """An object that a rank says it wrote, with its size in bytes."""

    name: str
    size: int
    rank: int


def require_visible(
    store: ByteStore,
    expected: Sequence[Expected],
    seconds: float,
    threads: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when every object is there with its size. Looks into one listing with sizes, where the store has such,
    and then by name at what that does not show, again and again.

    Args:
        seconds: how long to look; at least once.

    Raises:
        StoreError: objects are absent or have another size; names their ranks.
    """
    until, pause = clock() + seconds, FIRST_PAUSE
    listed = store.list_sizes() or {}
    unseen = [each for each in expected if listed.get(each.name) != each.size]
    while unseen := _look(store, unseen, threads):
        left = until - clock()
        if left <= 0:
            raise _unseen_error(store, expected, unseen, seconds)
        sleep(min(pause, left))
        pause = min(2 * pause, LAST_PAUSE)


def _look(store: ByteStore, objects: Sequence[Expected], threads: int) -> list[Expected]:
    """Those that are not there by name, in the order given."""
    seen: set[str] = set()

    def look(some: Sequence[Expected]) -> None:
        seen.update(each.name for each in some if _is_there(store, each))

    parts = [objects[i : i + _NAMES_PER_TASK] for i in range(0, len(objects), _NAMES_PER_TASK)]
    tasks: list[Task] = [lambda part=part: look(part) for part in parts]  # type: ignore[misc]
    run_all(tasks, threads)
    return [each for each in objects if each.name not in seen]


def _is_there(store: ByteStore, expected: Expected) -> bool:
    for attempt in range(2):
        info = store.stat(expected.name)
        if info is not None and info.size == expected.size:
            return True
        if attempt == 0:
            try:
                store.read_into(expected.name, [], [])  # to open a file has a network client ask its server
            except MissingFileError:
                return False
    return False


def _unseen_error(
    store: ByteStore, expected: Sequence[Expected], unseen: Sequence[Expected], seconds: float
) -> StoreError:
    """What is missing of the first such rank: all that it wrote, or a part."""
    all_of, missing_of = defaultdict[int, int](int), defaultdict[int, list[Expected]](list)
    for each in expected:
        all_of[each.rank] += 1
    for each in unseen:
        missing_of[each.rank].append(each)
    rank, missing = min(missing_of.items())
    others = f", and of {len(missing_of) - 1} more ranks" if len(missing_of) > 1 else ""
    head = f"nothing was published: {store.url}/{missing[0].name}, which rank {rank} wrote,"
    if len(missing) == all_of[rank] and rank != 0:
        return StoreError(
            f"{head} is not there for rank 0, nor is anything else of rank {rank}{others}, though it was looked for "
            f"over {max(seconds, 0):.0f} s. The path is probably not one file system that all ranks share, but "
            "node-local: save to a shared one"
        )
    return StoreError(
        f"{head} is gone or has another size than the {missing[0].size} bytes written, as {len(missing) - 1} more of "
        f"rank {rank}{others}: it was removed, moved or cut meanwhile. Find out by whom, and try again"
    )
