"""Runs on a rank of the pool: a process group for the length of one function."""

import warnings
from typing import Any

from hyper_ckpt.testing.child import Target
from hyper_ckpt_sample import framework
from hyper_ckpt_sample.platform import default


def run(rank: int, world_size: int, port: int, target: Target, args: tuple[Any, ...]) -> Any:
    """Calls `target(rank, world_size, *args)` in a process group. Warnings are errors, as in the tests."""
    framework.init_process_group(rank, world_size, port)
    ranks = default().ranks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return target.resolve()(rank, world_size, *args)
    finally:
        if world_size > 1:
            ranks.close()
        framework.destroy_process_group()
