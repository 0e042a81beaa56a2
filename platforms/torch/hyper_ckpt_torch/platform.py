"""The torch platform: its parts, put together for one process group."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.numpy_platform import SingleRank
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import Platform, Ranks
from hyper_ckpt.errors import PlatformError
from hyper_ckpt_torch.hyper_parallel import HyperParallelTensors
from hyper_ckpt_torch.objects import TorchObjects
from hyper_ckpt_torch.old_sharded import OldShardedTensors
from hyper_ckpt_torch.stager import TorchStager
from hyper_ckpt_torch.tensors import TorchTensors

_PLATFORMS: weakref.WeakKeyDictionary[Any, Platform] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class TorchPlatform(Platform):
    """torch tensors, DTensors and numpy arrays on the ranks of a process group.

    Nothing is sent before the first save or load. Keep one instance per group: it owns connections,
    buffers and the numbering of the group's saves. Without an initialised torch.distributed it is a
    world of one.

    Args:
        process_group: this process is a member; None is the default group.
        key_value_host: name or address under which the other ranks reach the group's rank 0. Only needed where
            the address that rank 0 uses towards MASTER_ADDR is not that.
        groups: gloo groups of some of the ranks, as `dist.new_group` returned them on each, in which boxes that just
            these ranks want are passed on, instead of in groups of our own. Nothing else may use them during a load.

    Raises:
        PlatformError: this process is not in the group, or `groups` cannot be used.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        key_value_host: str | None = None,
        groups: Sequence[Any] = (),
    ) -> None:
        ranks, global_ranks = _ranks(process_group, key_value_host, groups)
        tensors = all_tensors(global_ranks, global_ranks[ranks.rank])
        super().__init__("torch", ranks, tensors, TorchStager(), TorchObjects())


def all_tensors(global_ranks: Sequence[int], own: int) -> CompositeTensors:
    """All kinds of tensors that a torch job may have.

    Args:
        global_ranks: torch's rank of each rank of the platform.
        own: torch's rank of this process.
    """
    of_torch = [TorchTensors(global_ranks), HyperParallelTensors(global_ranks, own), OldShardedTensors(global_ranks)]
    return CompositeTensors([*of_torch, NumpyTensors()])


def default() -> Platform:
    """The platform of the default process group, the same instance while that group lives."""
    if not _initialised():
        return _alone()
    group = dist.group.WORLD
    with _LOCK:
        if group not in _PLATFORMS:
            _PLATFORMS[group] = TorchPlatform()
        return _PLATFORMS[group]


@functools.cache
def _alone() -> Platform:
    return TorchPlatform()


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _ranks(
    process_group: dist.ProcessGroup | None, key_value_host: str | None, groups: Sequence[Any]
) -> tuple[Ranks, tuple[int, ...]]:
    if not _initialised():
        if process_group is not None:
            raise PlatformError("the process group was destroyed: make a TorchPlatform of a live one")
        return SingleRank(), (0,)
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise PlatformError("this process is not a member of the process group it was given")
    from hyper_ckpt_torch.ranks import TorchRanks

    ranks = TorchRanks(group, key_value_host, groups)
    return (ranks if ranks.world_size > 1 else SingleRank()), ranks.global_ranks
