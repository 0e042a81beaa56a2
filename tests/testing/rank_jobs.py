"""What ranks run in the tests of the launcher and the pool."""

import os
import signal
import sys
import time

from hyper_ckpt.errors import CheckpointError


def identity(rank: int, world_size: int, *args: object) -> tuple[object, ...]:
    return rank, world_size, os.getpid(), *args


def environment(rank: int, world_size: int) -> dict[str, str]:
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FROM_TEST"]
    return {name: os.environ[name] for name in names if name in os.environ}


def fails_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        print("about to fail")
        raise CheckpointError("the disk of rank 1 is full")
    return rank


def dies_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def hangs_on_zero(rank: int, world_size: int) -> None:
    if rank == 0:
        print("still here", flush=True)
        time.sleep(300)


def exits(rank: int, world_size: int, code: int) -> None:
    sys.exit(code if rank == 1 else 0)


def big(rank: int, world_size: int, nbytes: int) -> bytes:
    return bytes(nbytes)


def leaves_a_child(rank: int, world_size: int) -> int:
    return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "300")


if __name__ == "__main__":
    print("script on rank", os.environ["RANK"], sys.argv[1:])
