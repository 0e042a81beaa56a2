"""Makes this process a rank, however it was started."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import mindspore as ms
import mindspore.mint.distributed as dist

_kept: list[Any] = []


def join() -> tuple[int, int]:
    """Joins the job of msrun, or the one that RANK, WORLD_SIZE and MASTER_PORT describe. Returns rank and size."""
    if "MS_ROLE" in os.environ:
        ms.communication.init()
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _join_on_cpu(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"]))
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def leave() -> None:
    """Waits for the others: rank 0 hosts what they talk through. MindSpore's barrier returns at once on the CPU."""
    if dist.is_initialized():
        dist.all_gather_object([None] * dist.get_world_size(), 0)


def _join_on_cpu(rank: int, world_size: int, port: int) -> None:
    """Without msrun's scheduler, which takes ten seconds longer. A private function of MindSpore 2.10: on the CPU,
    `init_process_group` knows no public way."""
    from mindspore.communication.management import _init_with_store

    wait = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, world_size=world_size, is_master=rank == 0, timeout=wait)
    _init_with_store(backend="mccl", timeout=wait, world_size=world_size, rank=rank, store=store, group_name="")
    _kept.append(store)
