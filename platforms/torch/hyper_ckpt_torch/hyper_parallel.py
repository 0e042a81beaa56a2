"""hyper-parallel's own DTensor on torch, as the core sees it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from hyper_ckpt.contracts.platform import HostTensor, LocalShard, TensorDescription
from hyper_ckpt.errors import UnsupportedStateError
from hyper_ckpt.tensor_map import Sharding, Shardings, read_dtensor
from hyper_ckpt_torch.devices import current_device
from hyper_ckpt_torch.kinds import is_hyper_parallel
from hyper_ckpt_torch.tensors import TorchTensors, check_storable, dtype_name, memory_signature, torch_dtype


class HyperParallelTensors(TorchTensors):
    """hyper-parallel's `DTensor`. Nothing is asked of such a tensor but what it says by itself: each of torch's own
    methods would go through its dispatcher.

    Args:
        global_ranks: torch's rank of each rank of the platform.
        own: torch's rank of this process.
    """

    def __init__(self, global_ranks: Sequence[int], own: int) -> None:
        super().__init__(global_ranks)
        self._shardings, self._own = Shardings(global_ranks, own), own

    def describe(self, value: Any) -> TensorDescription | None:
        kind: Any = type(value)
        if not is_hyper_parallel(kind):
            return None
        local = _local(value)
        check_storable(local)
        sharding = self._sharding(value)
        return TensorDescription(dtype_name(local.dtype), sharding.shape, sharding.layout, not local.is_meta)

    def may_have_parts(self, kind: type) -> bool:
        return False

    def local_shards(self, value: Any) -> list[LocalShard]:
        local = _local(value)
        box = self._sharding(value).own_box(local.shape, self._own)
        return [] if box is None else [LocalShard(*box, local if local.shape == box[1] else local.reshape(box[1]))]

    def empty(self, description: TensorDescription, like: Any = None) -> torch.Tensor:
        if like is None:
            return super().empty(description)
        local, dtype = _local(like), torch_dtype(description.dtype)
        device = current_device(like.device_mesh.device_type) if local.is_meta else local.device
        made = type(like).from_local(
            torch.empty(local.shape, dtype=dtype, device=device), like.device_mesh, like.placements
        )
        if self._sharding(made) != self._sharding(like):
            raise UnsupportedStateError(
                "a hyper-parallel DTensor without memory whose layout is more than its placements cannot be loaded: "
                "give it memory first"
            )
        assert isinstance(made, torch.Tensor)
        return made

    def signature(self, value: Any) -> Hashable | None:
        local = memory_signature(_local(value))
        return None if local is None else (type(value), read_dtensor(value), tuple(value.shape), local)

    def plain(self, value: Any) -> HostTensor | None:
        return None

    def before_writes(self, values: Sequence[Any]) -> None:
        return None  # `writable` has told autograd: a DTensor and its local part count together

    def _sharding(self, value: Any) -> Sharding:
        return self._shardings.of(read_dtensor(value), tuple(value.shape))


def _local(value: Any) -> torch.Tensor:
    local: torch.Tensor = value.to_local()
    return local.detach()
