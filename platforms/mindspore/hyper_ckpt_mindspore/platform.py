"""The MindSpore platform: its parts, put together for one group of ranks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import mindspore.mint.distributed as dist

from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.numpy_platform import SingleRank
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import Platform, Ranks
from hyper_ckpt.errors import PlatformError
from hyper_ckpt_mindspore.devices import Device
from hyper_ckpt_mindspore.layouts import Layouts
from hyper_ckpt_mindspore.objects import MindSporeObjects
from hyper_ckpt_mindspore.stager import MindSporeStager
from hyper_ckpt_mindspore.tensors import MindSporeTensors

_PLATFORMS: dict[tuple[int, int], Platform] = {}
_LOCK = threading.Lock()


class MindSporePlatform(Platform):
    """MindSpore tensors, hyper-parallel's DTensors and numpy arrays on the ranks of a group.

    Nothing is sent before the first save or load. Keep one instance per group: it owns connections,
    buffers and the numbering of the group's saves. Where MindSpore has no world group it is a world of one.

    Args:
        group: name of a group that this process is a member of; None is the world group.
        layouts: how parameters lie over ranks, by `Parameter.name`: what `get_strategy_metadata(net)` or
            `get_current_strategy_metadata(net)` returns, or names with a `mindspore.parallel.Layout` each. Parameters
            that are not named lie whole on every rank.
        store: a `mindspore.mint.distributed.TCPStore` that all ranks of the group can reach, used once to find each
            other. Without it the first save or load begins with a collective, for which ranks must come within
            MindSpore's own limit (30 s on the CPU).
        key_value_host: name or address under which the other ranks reach the group's rank 0, where that is not the
            address it uses itself.
    """

    def __init__(
        self,
        group: str | None = None,
        *,
        layouts: Mapping[Any, Any] | None = None,
        store: dist.TCPStore | None = None,
        key_value_host: str | None = None,
    ) -> None:
        ranks, global_ranks, own = _ranks(group, store, key_value_host)
        device = Device()
        own_tensors = MindSporeTensors(Layouts(global_ranks, own, layouts), device)
        tensors = CompositeTensors([own_tensors, NumpyTensors()])
        super().__init__("mindspore", ranks, tensors, MindSporeStager(tensors, device), MindSporeObjects())


def default() -> Platform:
    """The platform of the world group, the same instance while that lives."""
    with _LOCK:
        here = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 0)
        if here not in _PLATFORMS:
            _PLATFORMS[here] = MindSporePlatform()
        return _PLATFORMS[here]


def _ranks(
    group: str | None, store: dist.TCPStore | None, key_value_host: str | None
) -> tuple[Ranks, tuple[int, ...], int]:
    """The ranks, MindSpore's number of each, and its number of this one."""
    if not dist.is_initialized():
        if group is not None:
            raise PlatformError(f"there is no group {group!r}: MindSpore's world was not initialised, or is destroyed")
        return SingleRank(), (0,), 0
    from hyper_ckpt_mindspore.ranks import MindSporeRanks

    ranks = MindSporeRanks(group, store, key_value_host)
    return (ranks if ranks.world_size > 1 else SingleRank()), ranks.global_ranks, dist.get_rank()
