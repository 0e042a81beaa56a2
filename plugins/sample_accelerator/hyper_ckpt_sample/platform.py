"""The platform: its parts, put together for one process group."""

from __future__ import annotations

import threading
import weakref

from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.numpy_platform import SingleRank
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import Platform, Ranks
from hyper_ckpt_sample import framework
from hyper_ckpt_sample.ranks import SampleRanks
from hyper_ckpt_sample.stager import SampleStager
from hyper_ckpt_sample.tensors import SampleTensors

_ALONE = framework.ProcessGroup(0, 1, "", 0)
_PLATFORMS: weakref.WeakKeyDictionary[framework.ProcessGroup, SamplePlatform] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class SamplePlatform(Platform):
    """The framework's tensors and numpy arrays, on the ranks of a process group. Nothing is sent before the first
    save or load."""

    def __init__(self, group: framework.ProcessGroup = _ALONE) -> None:
        ranks: Ranks = SingleRank() if group.world_size == 1 else SampleRanks(group)
        tensors = CompositeTensors([SampleTensors(group.rank, group.world_size), NumpyTensors()])
        super().__init__("sample", ranks, tensors, SampleStager())


def default() -> SamplePlatform:
    """The platform of the current process group, the same instance while that group lives."""
    group = framework.process_group() or _ALONE
    with _LOCK:
        if group not in _PLATFORMS:
            _PLATFORMS[group] = SamplePlatform(group)
        return _PLATFORMS[group]
