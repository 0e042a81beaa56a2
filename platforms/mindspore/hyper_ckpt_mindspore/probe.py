"""MindSpore's tensors from behind the contract, for the platform suite. On the CPU.

Bytes go in and come out through copies of MindSpore's own: reshaped to bytes in an array it was made from, or that
it gives.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import mindspore as ms
import mindspore.mint.distributed as dist
import numpy as np
from mindspore import mint
from mindspore.common import np_dtype
from mindspore.common.api import _pynative_executor
from mindspore.communication.management import _init_with_store

from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.dtypes import BY_NAME
from hyper_ckpt.testing.conformance.probe import PlatformProbe
from hyper_ckpt.values import ShardedTensor
from hyper_ckpt_mindspore.platform import MindSporePlatform
from hyper_ckpt_mindspore.tensors import DTYPES

_OPAQUE = ("Float8E4M3FN", "Float8E5M2", "Int4")  # hardly any operations have kernels for these
_TIMEOUT = timedelta(seconds=120)


class Probe(PlatformProbe):
    """The probe of MindSpore on the CPU."""

    def __init__(self) -> None:
        os.environ.setdefault("GLOG_v", "4")
        if ms.get_context("device_target") != "CPU":  # may be set once only
            ms.set_device("CPU")
        self._store: dist.TCPStore | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(DTYPES)

    def platform(self) -> Platform:
        from hyper_ckpt_mindspore.plugin import load

        return load()

    def make(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
        array = np.frombuffer(data, np.uint8)
        if dtype.startswith("float8"):
            return ms.Tensor(array.reshape(shape)).view(DTYPES[dtype])
        if dtype == "int4":
            return ms.Tensor(array.view("i1").reshape(shape), dtype=DTYPES[dtype])
        return ms.Tensor(array.view(_numpy_dtype(dtype)).reshape(shape))

    def raw(self, value: Any) -> bytes:
        bits = value.view(ms.uint8) if str(value.dtype) in _OPAQUE else value
        whole = bits if bits.is_contiguous() else bits.contiguous()
        return bytes(whole.asnumpy().tobytes())

    def overwrite(self, value: Any, data: bytes) -> None:
        shape = tuple(value.shape)
        if not data:
            return
        if str(value.dtype) == "Int4":  # no operation writes these
            _pynative_executor.sync()
            ctypes.memmove(value.data_ptr(), data, len(data))
        elif str(value.dtype) in _OPAQUE:
            value.view(ms.uint8).copy_(ms.Tensor(np.frombuffer(data, np.uint8).reshape(shape)))
        else:
            dtype = next(name for name, found in DTYPES.items() if found == value.dtype)
            value.copy_(self.make(dtype, shape, data))

    def strided(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Any | None:
        if not shape:
            return self.make(dtype, shape, data)
        carrier = BY_NAME[dtype].carrier
        larger = np.zeros(tuple(2 * n for n in reversed(shape)), carrier)
        every_second = (slice(1, None, 2),) * len(shape)
        larger[every_second].T[...] = np.frombuffer(data, carrier).reshape(shape)
        value = self.make(dtype, larger.shape, larger.tobytes())
        return mint.permute(value[every_second], tuple(reversed(range(len(shape)))))

    def tied(self, value: Any) -> Any | None:
        return value.view(tuple(value.shape))

    def views(self, value: Any) -> Sequence[tuple[Any, Any]]:
        half = value.shape[0] // 2
        rows = (value[:half], value[half : 2 * half])
        return [(value, mint.permute(value, (1, 0))), rows, (value[::2], value[1::2])]

    def overlapping(self, dtype: str, shape: tuple[int, ...]) -> Any:
        count = int(np.prod(shape[1:])) * BY_NAME[dtype].carrier.itemsize
        return mint.broadcast_to(self.make(dtype, shape[1:], bytes(count)), shape)

    def join(self, rank: int, world_size: int, address: str, port: int) -> Platform:
        self._store = dist.TCPStore(address, port, world_size=world_size, is_master=rank == 0, timeout=_TIMEOUT)
        _init_with_store(
            backend="mccl", timeout=_TIMEOUT, world_size=world_size, rank=rank, store=self._store, group_name=""
        )
        return MindSporePlatform(store=self._store)

    def meta(self, dtype: str, shape: tuple[int, ...]) -> Any | None:
        return mint.empty(shape, dtype=DTYPES[dtype], device="meta")

    def sharded(self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int) -> Any | None:
        """Cut along the first dimension. MindSpore has no such tensor of its own; its layouts are always even."""
        rows = -(-shape[0] // world_size)
        return self._pieces(dtype, shape, data, [slice(rank * rows, (rank + 1) * rows)])

    def more_sharded(
        self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int
    ) -> Sequence[Any]:
        """Every so many rows, each a piece of its own."""
        return [self._pieces(dtype, shape, data, [slice(r, r + 1) for r in range(rank, shape[0], world_size)])]

    def misshapen(self, dtype: str, shape: tuple[int, ...], rank: int, world_size: int) -> Any:
        larger = (shape[0] + 1, *shape[1:])
        data = bytes(int(np.prod(larger)) * BY_NAME[dtype].carrier.itemsize)
        return ShardedTensor([(self.make(dtype, larger, data), (0,) * len(shape))], shape)

    def _pieces(self, dtype: str, shape: tuple[int, ...], data: bytes, rows: Sequence[slice]) -> ShardedTensor:
        whole = np.frombuffer(data, BY_NAME[dtype].carrier).reshape(shape)
        shards = []
        for each in rows or [slice(0, 0)]:
            start, stop, _ = each.indices(shape[0])
            part = whole[start:stop]
            shards.append((self.make(dtype, part.shape, part.tobytes()), (start, *(0 for _ in shape[1:]))))
        return ShardedTensor(shards, shape)

    def local_raw(self, value: Any) -> bytes:
        return b"".join(self.raw(data) for data, _ in value.shards)


def _numpy_dtype(name: str) -> Any:
    return np.dtype(np_dtype.bfloat16 if name == "bfloat16" else name)
