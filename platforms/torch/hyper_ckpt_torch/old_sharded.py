"""torch's old ShardedTensor, as FSDP1 without a mesh and torchrec make it: explicit boxes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from hyper_ckpt.contracts.platform import HostTensor, LocalShard, TensorDescription
from hyper_ckpt.errors import UnsupportedLayoutError, UnsupportedStateError
from hyper_ckpt.layout import Boxes
from hyper_ckpt_torch.kinds import is_old_sharded
from hyper_ckpt_torch.tensors import TorchTensors, check_storable, dtype_name, memory_signature


class OldShardedTensors(TorchTensors):
    """`torch.distributed._shard.sharded_tensor.ShardedTensor`."""

    def describe(self, value: Any) -> TensorDescription | None:
        kind: Any = type(value)
        if not is_old_sharded(kind):
            return None
        shards, whole = self.local_shards(value), value.metadata()
        has_memory = not any(shard.data.is_meta for shard in shards)
        boxes = tuple((shard.offsets, shard.sizes) for shard in shards)
        return TensorDescription(dtype_name(whole.tensor_properties.dtype), tuple(whole.size), Boxes(boxes), has_memory)

    def may_have_parts(self, kind: type) -> bool:
        return False

    def local_shards(self, value: Any) -> list[LocalShard]:
        found = []
        for shard in value.local_shards():
            tensor, offsets, sizes = shard.tensor.detach(), shard.metadata.shard_offsets, shard.metadata.shard_sizes
            check_storable(tensor)
            if list(tensor.shape) != list(sizes) and tensor.numel():
                raise UnsupportedLayoutError(
                    f"a ShardedTensor has a part of shape {tuple(tensor.shape)}, but its metadata says {tuple(sizes)}: "
                    "take it from state_dict() outside of forward and backward"
                )
            if tensor.numel():
                found.append(LocalShard(tuple(offsets), tuple(sizes), tensor))
        return found

    def empty(self, description: TensorDescription, like: Any = None) -> torch.Tensor:
        if like is not None:
            raise UnsupportedStateError("a ShardedTensor without memory cannot be loaded: give it memory first")
        return super().empty(description)

    def signature(self, value: Any) -> Hashable | None:
        shards = [(shard.offsets, memory_signature(shard.data)) for shard in self.local_shards(value)]
        known = all(local is not None for _, local in shards)
        return (type(value), tuple(value.metadata().size), *shards) if known else None

    def plain(self, value: Any) -> HostTensor | None:
        return None

    def before_writes(self, values: Sequence[Any]) -> None:
        return None  # `writable` has told autograd, shard by shard
