"""A rank that saves without talking; one of them dies."""

import os
import signal

import numpy as np

from hyper_ckpt import NumpyPlatform, SaveOptions, save


def save_part(rank: int, world_size: int, path: str, dies: int) -> None:
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    save(
        {"x": np.arange(4), "mine": {str(rank): rank}},
        path,
        platform=NumpyPlatform(rank=rank, world_size=world_size),
        use_collectives=False,
        options=SaveOptions(save_token="run-1"),
    )


def late_part(rank: int, world_size: int, path: str) -> None:
    """What rank 1 of 3 does when it was started again."""
    save_part(1, 3, path, -1)
