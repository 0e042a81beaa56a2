"""numpy arrays from behind the contract; a world of them is made of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_ckpt.box import cut
from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.builtin.numpy_tensors import numpy_dtype
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.dtypes import BY_NAME
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

    def join(self, rank: int, world_size: int, address: str, port: int) -> Platform:
        raise NotImplementedError("numpy has no processes that talk: run_world makes a world of threads")

    def run_world(self, world_size: int, fn: Callable[[Platform], Any], timeout: float) -> list[Any]:
        return run_world(world_size, fn, timeout=timeout)

    def sharded(self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int) -> Any:
        """Cut along the first dimension."""
        layout = MeshLayout(Mesh((world_size,), tuple(range(world_size))), (Shard(0),))
        box = box_of(shape, layout, rank)
        assert box is not None
        part = cut(self.make(dtype, shape, data), *box).copy()
        return ShardedTensor([(part, box[0])], shape)

    def local_raw(self, value: Any) -> bytes:
        return b"".join(data.tobytes() for data, _ in value.shards)
