"""Runs on a rank of the pool: a process group for the length of one function."""

import gc
import os
import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hyper_ckpt.testing.child import Target


def run(rank: int, world_size: int, store: str, target: Target, args: tuple[Any, ...]) -> Any:
    """Calls `target(rank, world_size, *args)` in a gloo world. Warnings are errors, as in the tests."""
    os.environ["WORLD_SIZE"] = str(world_size)  # the pool is larger than this world
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = target.resolve()(rank, world_size, *args)
        # Nobody takes its groups down while another rank still uses them.
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()
        gc.collect()  # platforms, and the key-value stores that they host
