"""numpy arrays from behind the contract; a world of them is made of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_ckpt.box import cut
from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.dtypes import BY_NAME, numpy_dtype
from hyper_ckpt.layout import Mesh, MeshLayout, Shard
from hyper_ckpt.testing.conformance.probe import PlatformProbe
from hyper_ckpt.testing.meshed import box_of
from hyper_ckpt.testing.world import run_world
from hyper_ckpt.values import ShardedTensor


class NumpyProbe(PlatformProbe):
    """The probe of the built-in platform."""

    def __init__(self) -> None:
        self._platform = NumpyPlatform()

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(BY_NAME)

    def platform(self) -> Platform:
        return self._platform

    def make(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
        return np.frombuffer(data, np.uint8).copy().view(numpy_dtype(dtype)).reshape(shape)

    def raw(self, value: Any) -> bytes:
        return bytes(value.tobytes())

    def overwrite(self, value: Any, data: bytes) -> None:
        value[...] = self.make(value.dtype.name, value.shape, data)

    def strided(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
        larger = np.zeros(tuple(2 * n for n in reversed(shape)), numpy_dtype(dtype))
        view = larger[(slice(1, None, 2),) * len(shape)].T
        view[...] = self.make(dtype, shape, data)
        return view

    def tied(self, value: Any) -> Any:
        return value[...]

    def views(self, value: Any) -> Sequence[tuple[Any, Any]]:
        half = len(value) // 2
        other = value.view("i4" if value.dtype != "i4" else "f4") if value.itemsize == 4 else value.T
        return [(value, value.T), (value, other), (value[:half], value[-half:]), (value[::2], value[1::2])]

    def overlapping(self, dtype: str, shape: tuple[int, ...]) -> Any:
        row = np.zeros(shape[1:], numpy_dtype(dtype))
        return np.lib.stride_tricks.as_strided(row, shape, (0, *row.strides))

    def join(self, rank: int, world_size: int, address: str, port: int) -> Platform:
        raise NotImplementedError("numpy has no processes that talk: run_world makes a world of threads")

    def run_world(self, world_size: int, fn: Callable[[Platform], Any], timeout: float) -> list[Any]:
        return run_world(world_size, fn, timeout=timeout)

    def sharded(self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int) -> Any:
        """Cut along the first dimension."""
        return self._cut(self.make(dtype, shape, data), 0, rank, world_size)

    def more_sharded(
        self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int
    ) -> Sequence[Any]:
        """Cut along the last dimension, and every so many rows, each a piece of its own."""
        whole = self.make(dtype, shape, data)
        first = (0,) * (len(shape) - 1)
        rows = [(whole[row : row + 1].copy(), (row, *first)) for row in range(rank, shape[0], world_size)]
        rows = rows or [(whole[:0].copy(), (0, *first))]
        return [self._cut(whole, len(shape) - 1, rank, world_size), ShardedTensor(rows, shape)]

    def misshapen(self, dtype: str, shape: tuple[int, ...], rank: int, world_size: int) -> Any:
        part = np.zeros((shape[0] + 1, *shape[1:]), numpy_dtype(dtype))
        return ShardedTensor([(part, (0,) * len(shape))], shape)

    def _cut(self, whole: Any, dim: int, rank: int, world_size: int) -> ShardedTensor:
        layout = MeshLayout(Mesh((world_size,), tuple(range(world_size))), (Shard(dim),))
        box = box_of(whole.shape, layout, rank)
        assert box is not None
        return ShardedTensor([(cut(whole, *box).copy(), box[0])], whole.shape)

    def local_raw(self, value: Any) -> bytes:
        return b"".join(data.tobytes() for data, _ in value.shards)
