"""Lets the conformance suite make this framework's tensors and look at them, without the plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.testing.conformance import PlatformProbe
from hyper_ckpt_sample import framework
from hyper_ckpt_sample.framework import Sharded, Sharding, Tensor
from hyper_ckpt_sample.platform import default
from hyper_ckpt_sample.ranks import SampleRanks

_OWN_NAMES = {
    "bool": "bool", "uint8": "u8", "int8": "i8", "uint16": "u16", "int16": "i16", "uint32": "u32", "int32": "i32",
    "uint64": "u64", "int64": "i64", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
    "complex64": "c64", "complex128": "c128", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
}  # fmt: skip


class Probe(PlatformProbe):
    """Tensors by the framework's own means."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(_OWN_NAMES)

    def platform(self) -> Platform:
        return default()

    def make(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
        return framework.from_host(_OWN_NAMES[dtype], shape, data)

    def raw(self, value: Tensor) -> bytes:
        return value.to_host()

    def overwrite(self, value: Tensor, data: bytes) -> None:
        value.set_bytes(data)

    def strided(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
        turned = framework.empty(_OWN_NAMES[dtype], tuple(2 * n for n in reversed(shape))).transpose()
        every_second = turned[tuple(slice(None, None, 2) for _ in shape)]
        every_second.set_bytes(data)
        every_second.to_host()  # finished
        return every_second

    def tied(self, value: Tensor) -> Tensor:
        return value.alias()

    def views(self, value: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        half, whole = value.shape[0] // 2, slice(None)
        rows = [value[slice(None, half), whole], value[slice(half, 2 * half), whole]]
        return [(value, value.transpose()), (rows[0], rows[1]), (rows[0], value[slice(None, None, 2), whole])]

    def overlapping(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        return framework.empty(_OWN_NAMES[dtype], shape[1:]).broadcast(shape[0])

    def meta(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        return framework.described(_OWN_NAMES[dtype], shape)

    def join(self, rank: int, world_size: int, address: str, port: int) -> Platform:
        framework.init_process_group(rank, world_size, port, address)
        return default()

    def leave(self) -> None:
        ranks = default().ranks
        if isinstance(ranks, SampleRanks):
            ranks.close()
        framework.destroy_process_group()

    def sharded(self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int) -> Sharded | None:
        if not shape:
            return None
        spec = ("ranks", *(None for _ in shape[1:]))
        return framework.shard(_OWN_NAMES[dtype], shape, data, Sharding((("ranks", world_size),), spec), rank)

    def more_sharded(
        self, dtype: str, shape: tuple[int, ...], data: bytes, rank: int, world_size: int
    ) -> Sequence[Sharded]:
        """Several axes, in each order and dimension, and ranks from 1 on."""
        lengths = (world_size // 2, 2) if world_size % 2 == 0 else (world_size, 1)
        axes = tuple(zip(("slow", "fast"), lengths, strict=True))
        shardings = [Sharding(axes, self._last(shape, names)) for names in ("fast", ("slow", "fast"), ("fast", "slow"))]
        if len(shape) == 2:
            shardings += [Sharding(axes, ("slow", "fast")), Sharding(axes, ("fast", "slow"))]
        if world_size > 1:
            shardings.append(Sharding((("some", world_size - 1),), self._last(shape, "some"), first_rank=1))
        return [framework.shard(_OWN_NAMES[dtype], shape, data, each, rank) for each in shardings]

    def misshapen(self, dtype: str, shape: tuple[int, ...], rank: int, world_size: int) -> Sharded:
        local = framework.empty(_OWN_NAMES[dtype], (shape[0] + 1, *shape[1:]))
        return Sharded(local, shape, Sharding((("ranks", world_size),), ("ranks", *(None for _ in shape[1:]))))

    def _last(self, shape: tuple[int, ...], names: str | tuple[str, ...]) -> tuple[str | tuple[str, ...] | None, ...]:
        return (*(None for _ in shape[1:]), names)

    def local_raw(self, value: Any) -> bytes:
        local: Tensor = value.local
        return local.to_host()
