"""Which classes of tensors there are. All of it depends on the class alone, and is worked out once for each."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.lru_cache(maxsize=256)
def is_hyper_parallel(kind: Any) -> bool:
    """Whether a class is hyper-parallel's DTensor, or one like it: a torch.Tensor with a local part and a layout of its
    own, which torch's DTensor does not have."""
    if not issubclass(kind, torch.Tensor) or any(each.__module__.startswith("torch.distr") for each in kind.__mro__):
        return False
    return hasattr(kind, "to_local") and kind.layout is not torch.Tensor.layout


@functools.lru_cache(maxsize=256)
def is_old_sharded(kind: Any) -> bool:
    """Whether a class is torch's old ShardedTensor. Imports nothing: where that isn't imported, there is none."""
    return any(each.__module__.startswith("torch.distributed._shard") for each in kind.__mro__)
