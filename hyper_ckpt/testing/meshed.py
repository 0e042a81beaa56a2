"""Tensors that lie over ranks in any way a `Layout` can say, in plain memory: a framework's sharding without one.

def job(platform):
    layout = MeshLayout(Mesh((2,), (0, 1)), (Shard(0),))
    save({"w": distribute(whole, layout, platform.ranks.rank)}, path, platform=platform)

run_world(2, job, platform=meshed_platform)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_ckpt.box import cut
from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.host_stager import HostStager
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors, check_writable, memory_key
from hyper_ckpt.contracts.platform import (
    ByteBuffer,
    Carrier,
    Done,
    LocalShard,
    Pending,
    Platform,
    Ranks,
    TensorDescription,
    Tensors,
    sampled_fingerprint,
)
from hyper_ckpt.dtypes import BY_NAME, numpy_dtype
from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt.layout import MeshLayout, Replicated, expand

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(eq=False)
class Meshed:
    """One rank's part of a tensor.

    Args:
        local: this rank's box; None: no memory yet, as on torch's meta device.
        shape: of the whole tensor.
        layout: a `Replicated` one makes it a plain tensor.
        rank: this rank's number.
        dtype: name of the dtype.
        on_device: not to be read or written but through the stager, as memory of an accelerator.
    """

    local: Carrier | None
    shape: tuple[int, ...]
    layout: MeshLayout | Replicated
    rank: int
    dtype: str
    on_device: bool = False

    @property
    def box(self) -> Box | None:
        """Offsets and sizes of this rank's box; None if it isn't in the mesh."""
        return box_of(self.shape, self.layout, self.rank)


def box_of(shape: tuple[int, ...], layout: MeshLayout | Replicated, rank: int) -> Box | None:
    """The box of a rank; None if it isn't in the mesh."""
    if isinstance(layout, Replicated):
        return (0,) * len(shape), shape
    if rank not in layout.mesh.ranks:
        return None
    coordinate = np.unravel_index(layout.mesh.ranks.index(rank), layout.mesh.shape) if layout.mesh.shape else ()
    at = np.array(coordinate, np.int64).reshape(-1, 1)
    offsets, sizes = expand(shape, layout.mesh.shape, layout.placements, layout.order, at)
    return tuple(offsets[0].tolist()), tuple(sizes[0].tolist())


def distribute(whole: Carrier, layout: MeshLayout | Replicated, rank: int, *, on_device: bool = False) -> Meshed:
    """A rank's part of a whole array, in memory of its own."""
    box = box_of(whole.shape, layout, rank)
    local = np.empty(0, whole.dtype) if box is None else cut(whole, *box).copy()
    return Meshed(local, whole.shape, layout, rank, whole.dtype.name, on_device)


class MeshedTensors(Tensors):
    """`Meshed` tensors."""

    def describe(self, value: Any) -> TensorDescription | None:
        if not isinstance(value, Meshed):
            return None
        return TensorDescription(value.dtype, value.shape, value.layout, value.local is not None)

    def local_shards(self, value: Any) -> list[LocalShard]:
        box = value.box
        if box is None:
            return []
        if value.local is not None and value.local.shape != box[1]:
            raise UnsupportedLayoutError(f"rank {value.rank} has a box of {box[1]} but an array of {value.local.shape}")
        return [LocalShard(box[0], box[1], value)]

    def host_view(self, shard: LocalShard) -> Carrier | None:
        return None if shard.data.on_device else memory_of(shard)

    def writable(self, shard: LocalShard) -> Carrier | None:
        view = check_writable(memory_of(shard))
        return None if shard.data.on_device else view

    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return sampled_fingerprint([memory_of(shard) for shard in shards])

    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        layout, rank, on_device = (like.layout, like.rank, like.on_device) if like else (Replicated(), 0, False)
        box = box_of(description.shape, layout, rank)
        local = np.empty(0 if box is None else box[1], numpy_dtype(description.dtype))
        return Meshed(local, description.shape, layout, rank, description.dtype, on_device)

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        array = shard.data.local
        if array is None:
            return None
        return memory_key(array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.name)

    def signature(self, value: Any) -> Hashable | None:
        array = value.local
        if array is None:
            return None
        address = array.__array_interface__["data"][0]
        return (value.shape, value.layout, value.rank, value.dtype, array.shape, array.strides, address)


def memory_of(shard: LocalShard) -> Carrier:
    """The memory of a shard of `Meshed`, on a device or not."""
    array: Carrier = shard.data.local
    return array.view(BY_NAME[array.dtype.name].carrier)


class MeshedStager(HostStager):
    """Copies between `Meshed` tensors and buffers, and counts the copies."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.copies_out = self.copies_in = 0

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        view = memory_of(shard)
        buffer[: view.nbytes].view(view.dtype).reshape(view.shape)[...] = view
        self.copies_out += 1
        return Done()

    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        view = memory_of(shard)
        view[...] = buffer[: view.nbytes].view(view.dtype).reshape(view.shape)
        self.copies_in += 1
        return Done()


def meshed_platform(ranks: Ranks) -> Platform:
    """A Platform over `Meshed` tensors, numpy arrays, and `ShardedTensor`s of either; for `run_world`."""
    tensors = CompositeTensors([MeshedTensors(), NumpyTensors()])
    return Platform("meshed", ranks, tensors, MeshedStager(tensors))
