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
def can_be_flattened(kind: Any) -> bool:
    """Whether tensors of a class are made of other tensors, and say of which. DTensors and nested tensors are no such:
    what they say is for torch's compiler."""
    flattens = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return flattens and not any(each.__module__.startswith(("torch.distr", "torch.nested")) for each in kind.__mro__)


@functools.lru_cache(maxsize=256)
def has_own_attributes(kind: Any) -> bool:
    """Whether tensors of a class may hold more than their elements: a class that torch itself does not have, whose
    attributes nobody takes along."""
    return not kind.__module__.startswith("torch.") and kind is not torch.Tensor and not is_hyper_parallel(kind)


@functools.lru_cache(maxsize=256)
def slots_of(kind: Any) -> tuple[str, ...]:
    """The names of the slots of a class and its bases."""
    names = [getattr(each, "__slots__", ()) for each in kind.__mro__]
    return tuple(name for each in names for name in ([each] if isinstance(each, str) else each))


@functools.lru_cache(maxsize=256)
def is_old_sharded(kind: Any) -> bool:
    """Whether a class is torch's old ShardedTensor. Imports nothing: where that isn't imported, there is none."""
    return any(each.__module__.startswith("torch.distributed._shard") for each in kind.__mro__)
