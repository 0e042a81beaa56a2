"""What runs in each of the processes that share a store."""

from __future__ import annotations

import time

from hyper_ckpt.contracts.store import ByteStore, Expect
from hyper_ckpt.errors import CheckpointReplacedError
from hyper_ckpt.testing.conformance.check import fail
from hyper_ckpt.testing.conformance.store_subject import put

_MEET_SECONDS = 20.0


def write(rank: int, world_size: int, store: ByteStore, turns: int) -> list[str]:
    """Writes objects beside those of the others. Returns their names."""
    _meet(store, "ready/write", rank, world_size)
    names = [f"dir/{turn}/{rank}" for turn in range(turns)]
    for name in names:
        put(store, name, name.encode() * 100)
    return names


def publish(
    rank: int, world_size: int, store: ByteStore, names: list[str], etags: list[str] | None
) -> list[str | CheckpointReplacedError]:
    """Publishes under the names that the others publish under. Returns the etag or the refusal for each."""
    results: list[str | CheckpointReplacedError] = []
    for turn, name in enumerate(names):
        expected: Expect | str = Expect.ABSENT if etags is None else etags[turn]
        _meet(store, f"ready/{name}", rank, world_size)
        try:
            results.append(store.publish(name, b"of %d" % rank, expected, sync=False))
        except CheckpointReplacedError as error:
            results.append(error)
    return results


def _meet(store: ByteStore, where: str, rank: int, world_size: int) -> None:
    """Returns when all processes are here, as told by the store."""
    store.publish(f"{where}/{rank}", b"", Expect.ANY, sync=False)
    deadline = time.monotonic() + _MEET_SECONDS
    missing = set(range(world_size))
    while missing:
        missing = {other for other in missing if store.stat(f"{where}/{other}") is None}
        if missing and time.monotonic() > deadline:
            fail(
                "an object that one process has published is seen by the others",
                f"process {rank} does not see those of {sorted(missing)}",
                "if the store lives in one process, declare without={'processes': ...}",
            )
