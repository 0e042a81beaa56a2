"""torch from behind the contract, for `hyper-ckpt conformance`; on the accelerator that is there, else on the CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.dtypes import BY_NAME
from hyper_ckpt.testing.conformance.probe import PlatformProbe
from hyper_ckpt_torch.devices import ACCELERATORS
from hyper_ckpt_torch.plugin import load

_NOT_DENSE = ("int4", "uint4")  # torch only has their names: nothing can be done with such tensors
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DELAY_CYCLES = 20_000_000


class TorchProbe(PlatformProbe):
    """Plain tensors and DTensors; worlds are gloo groups, so that several ranks may share one device."""

    def __init__(self) -> None:
        self._device = _device(int(os.environ.get("LOCAL_RANK", "0")))
        self._mesh: DeviceMesh | None = None
        self._mesh_2d: DeviceMesh | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(n for n in BY_NAME if n not in _NOT_DENSE and isinstance(getattr(torch, n, None), torch.dtype))

    def platform(self) -> Platform:
        return load()

    def make(self, dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
        made = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return made.view(getattr(torch, dtype)).reshape(shape).to(self._device)

    def raw(self, value: Any) -> bytes:
        return _bits(value.detach().to("cpu")).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def overwrite(self, value: Any, data: bytes) -> None:
        new = self.make(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
        self._keep_busy()
        _bits(value).copy_(_bits(new))

    def strided(self, dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
        kind = getattr(torch, dtype)
        doubled = [2 * n for n in reversed(shape)]
        memory = torch.zeros(math.prod(doubled) * kind.itemsize, dtype=torch.uint8, device=self._device)
        view = memory.view(kind).reshape(doubled)[(slice(1, None, 2),) * len(shape)]
        view = view.permute(*reversed(range(len(shape))))
        _bits(view).copy_(_bits(self.make(dtype, shape, data)))
        return view

    def tied(self, value: Any) -> Any:
        return value.detach()

    def views(self, value: Any) -> Sequence[tuple[Any, Any]]:
        half = len(value) // 2
        pairs = [(value, value.T), (value[:half], value[half : 2 * half]), (value[::2], value[1::2])]
        size = value.dtype.itemsize
        return [*pairs, (value, value.view(_INTEGERS[size]))] if size in _INTEGERS else pairs

    def overlapping(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape[1:], dtype=getattr(torch, dtype), device=self._device).expand(shape)

    def meta(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def join(self, rank: int, world_size: int, address: str, port: int) -> Platform:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        self._mesh = init_device_mesh(self._device.type, (world_size,))
        if world_size % 2 == 0:
            self._mesh_2d = init_device_mesh(self._device.type, (world_size // 2, 2))
        return load()

    def leave(self) -> None:
        dist.destroy_process_group()

    def sharded(self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int) -> DTensor:
        whole = self.make(dtype, shape, data)
        # Every rank has the whole: it takes its part, and nothing is sent.
        return distribute_tensor(whole, self._mesh, [Shard(0)], src_data_rank=None)

    def more_sharded(
        self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int
    ) -> Sequence[DTensor]:
        whole, last = self.make(dtype, shape, data), len(shape) - 1
        made = [distribute_tensor(whole, self._mesh, [Shard(last)], src_data_rank=None)] if last else []
        if self._mesh_2d is not None:
            for placements in ([Shard(0), Shard(last)], [Shard(last), Shard(0)], [Replicate(), Shard(last)]):
                made.append(distribute_tensor(whole, self._mesh_2d, placements, src_data_rank=None))
        return made

    def misshapen(self, dtype: str, shape: tuple[int, ...], rank: int, world_size: int) -> DTensor:
        local = torch.zeros((shape[0] + 1, *shape[1:]), dtype=getattr(torch, dtype), device=self._device)
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=local.stride()
        )

    def local_raw(self, value: Any) -> bytes:
        return self.raw(value.to_local())

    def _keep_busy(self) -> None:
        """Keeps the stream busy for a moment, so that a copy that does not wait for it comes too early."""
        sleep = getattr(torch.get_device_module(self._device), "_sleep", None)
        if sleep is not None:
            sleep(_DELAY_CYCLES)


def _device(local_rank: int) -> torch.device:
    for kind in ACCELERATORS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            device = torch.device(kind, local_rank % module.device_count())
            module.set_device(device)
            return device
    return torch.device("cpu")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: not all devices copy all dtypes."""
    return tensor.view(_INTEGERS.get(tensor.dtype.itemsize, tensor.dtype))
