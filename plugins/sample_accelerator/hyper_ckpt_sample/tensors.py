"""The framework's tensors, as the core sees them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from hyper_ckpt.builtin.numpy_tensors import memory_key, overlaps_itself
from hyper_ckpt.contracts.platform import (
    WHOLE_FINGERPRINT_BYTES,
    Carrier,
    LocalShard,
    TensorDescription,
    Tensors,
    sampled_fingerprint,
)
from hyper_ckpt.errors import TargetError, UnsupportedDtypeError
from hyper_ckpt.layout import Replicated
from hyper_ckpt_sample import device, framework
from hyper_ckpt_sample.framework import Sharded, Tensor
from hyper_ckpt_sample.layouts import layout_of, own_box

NAMES = {
    "bool": "bool", "u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "u32": "uint32", "i32": "int32",
    "u64": "uint64", "i64": "int64", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
    "c64": "complex64", "c128": "complex128", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
"""The framework's name of a dtype, and the one in hyper_ckpt.dtypes."""
OWN_NAMES = {name: own for own, name in NAMES.items()}
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # as sampled_fingerprint takes them


class SampleTensors(Tensors):
    """`Tensor` and `Sharded`.

    Args:
        rank: this process's.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def describe(self, value: Any) -> TensorDescription | None:
        if not isinstance(value, Tensor | Sharded):
            return None
        local = value.local if isinstance(value, Sharded) else value
        if local.dtype not in NAMES:
            raise UnsupportedDtypeError(f"a tensor of dtype {local.dtype} cannot be stored: view it as u8")
        layout = (
            layout_of(value.sharding, value.shape, self._world_size) if isinstance(value, Sharded) else Replicated()
        )
        return TensorDescription(NAMES[local.dtype], value.shape, layout, local.memory is not None)

    def local_shards(self, value: Any) -> list[LocalShard]:
        if isinstance(value, Tensor):
            return [LocalShard((0,) * len(value.shape), value.shape, value)]
        box = own_box(value, self._rank)
        return [] if box is None else [LocalShard(*box, value.local)]

    def host_view(self, shard: LocalShard) -> Carrier | None:
        return None  # nothing of this framework lies in host memory

    def writable(self, shard: LocalShard) -> Carrier | None:
        if overlaps_itself(shard.data.shape, shard.data.strides, 1):
            raise TargetError("several elements of the tensor share memory (made by broadcast()?): load into a copy")
        return None

    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return sampled_fingerprint([_samples(shard.data) for shard in shards])

    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        dtype = OWN_NAMES.get(description.dtype)
        if dtype is None:
            raise UnsupportedDtypeError(f"this framework has no dtype {description.dtype}")
        if isinstance(like, Sharded):
            local = framework.empty(dtype, like.local.shape, _device_of(like.local))
            return Sharded(local, like.shape, like.sharding)
        return framework.empty(dtype, description.shape, None if like is None else _device_of(like))

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        tensor: Tensor = shard.data
        if tensor.memory is None:
            return None
        # The block tells devices apart as well; memory_key ignores what does not matter, as strides of length 1.
        return memory_key(id(tensor.memory), tensor.shape, tensor.strides, f"{tensor.dtype}+{tensor.offset}")

    def signature(self, value: Any) -> Hashable | None:
        local, sharding = (value.local, value.sharding) if isinstance(value, Sharded) else (value, None)
        if local.memory is None:
            return None
        memory = (id(local.memory), local.offset, local.strides)
        return (type(value), value.shape, sharding, local.dtype, local.shape, memory)


def _device_of(tensor: Tensor) -> device.Device | None:
    return None if tensor.memory is None else tensor.memory.device


def _samples(tensor: Tensor) -> Carrier:
    """What sampled_fingerprint looks at, brought to the host: all of a small tensor, pieces of a large one."""
    if tensor.nbytes < WHOLE_FINGERPRINT_BYTES:
        return np.frombuffer(_bytes_of(tensor), np.uint8)
    tensor = tensor.contiguous()
    flat = Tensor(tensor.dtype, (tensor.size,), (1,), tensor.memory, tensor.offset)
    count = _SAMPLE_BYTES // tensor.itemsize
    starts = np.linspace(0, tensor.size - count, _SAMPLES).astype(np.int64)
    parts = [_bytes_of(flat[slice(start, start + count),]) for start in starts.tolist()]
    return np.frombuffer(b"".join(parts), np.uint8)


def _bytes_of(tensor: Tensor) -> bytes:
    """The elements on the host, after the work on the caller's stream."""
    host = device.pinned(tensor.nbytes)
    device.copy_to_host(tensor.span, host)
    device.current_stream(tensor.span.memory.device).synchronize()
    return host.tobytes()
