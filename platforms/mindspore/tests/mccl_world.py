"""Runs on a rank of the pool: joins MindSpore's world once, and calls functions in groups of it."""

from __future__ import annotations

import gc
import warnings
from datetime import timedelta
from typing import Any

from hyper_ckpt.testing.child import Target

_TIMEOUT = timedelta(seconds=40)
_joined: dict[str, Any] = {}


def run(rank: int, size: int, port: int, world_size: int, target: Target, args: tuple[Any, ...]) -> Any:
    """Calls `target(rank, world_size, *args)` on the first `world_size` of `size` ranks. Warnings are errors, as in
    the tests."""
    if "port" not in _joined:
        join(rank, size, port)
    if rank >= world_size:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = target.resolve()(rank, world_size, *args)
    gc.collect()
    barrier(world_size)
    return result


def join(rank: int, size: int, port: int) -> None:
    """Makes this process a rank of MindSpore's world, without a scheduler. It can't be done twice in a process."""
    import mindspore as ms
    import mindspore.mint.distributed as dist
    from mindspore.communication.management import _init_with_store

    ms.set_device("CPU")
    store = dist.TCPStore("127.0.0.1", port, world_size=size, is_master=rank == 0, timeout=_TIMEOUT)
    _init_with_store(backend="mccl", timeout=_TIMEOUT, world_size=size, rank=rank, store=store, group_name="")
    _joined.update(port=port, store=store, size=size)


def store() -> Any:
    """The store through which the world was joined."""
    return _joined["store"]


def group(world_size: int) -> str | None:
    """The group of the first `world_size` ranks; None for all of them."""
    import mindspore.communication as comm

    if world_size == _joined["size"]:
        return None
    name = f"first-{world_size}"
    if name not in _joined:
        comm.create_group(name, list(range(world_size)))
        _joined[name] = True
    return name


def barrier(world_size: int) -> None:
    """Waits for the others. MindSpore's own barrier returns at once on the CPU."""
    import mindspore.mint.distributed as dist

    name = group(world_size)
    out = [None] * world_size
    dist.all_gather_object(out, 0) if name is None else dist.all_gather_object(out, 0, name)
