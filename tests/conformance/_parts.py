"""Platforms that keep every promise, made of parts that the bad plugins replace one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.host_stager import HostStager
from hyper_ckpt.builtin.numpy_platform import SingleRank
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import (
    ByteBuffer,
    Carrier,
    Done,
    HostTensor,
    KeyValueStore,
    LocalShard,
    Pending,
    Platform,
    Ranks,
    Stager,
    TensorDescription,
    Tensors,
)
from hyper_ckpt.dtypes import numpy_dtype
from hyper_ckpt.layout import Replicated
from hyper_ckpt.testing.conformance.numpy_probe import NumpyProbe
from hyper_ckpt.testing.world import run_world


class GoodTensors(Tensors):
    """numpy's own, for subclasses that change one answer."""

    def __init__(self) -> None:
        self.inner: Tensors = CompositeTensors([NumpyTensors()])

    def describe(self, value: Any) -> TensorDescription | None:
        return self.inner.describe(value)

    def local_shards(self, value: Any) -> list[LocalShard]:
        return self.inner.local_shards(value)

    def host_view(self, shard: LocalShard) -> Carrier | None:
        return self.inner.host_view(shard)

    def writable(self, shard: LocalShard) -> Carrier | None:
        return self.inner.writable(shard)

    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return self.inner.fingerprint(shards)

    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        return self.inner.empty(description, like)

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        return self.inner.storage_key(shard)

    def signature(self, value: Any) -> Hashable | None:
        self.inner.describe(value)  # a composite knows signatures of what it has described
        return self.inner.signature(value)


class PlainTensors(GoodTensors):
    """Says of plain arrays all at once, as numpy's do."""

    def plain(self, value: Any) -> HostTensor | None:
        self.inner.describe(value)  # a composite knows what is plain of what it has described
        return self.inner.plain(value)


class GoodRanks(Ranks):
    """Passes everything on to the ranks of a thread world."""

    def __init__(self, inner: Ranks) -> None:
        self.inner = inner
        self.size = inner.world_size

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world_size(self) -> int:
        return self.size

    @property
    def key_value_store(self) -> KeyValueStore:
        return self.inner.key_value_store

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.inner.all_gather_object(value)

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        return self.inner.gather_bytes(data)

    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        return self.inner.scatter_bytes(parts)

    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        return self.inner.broadcast_into(buffers, src, group)

    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        return self.inner.groups(rank_sets)


class GoodKeyValueStore(KeyValueStore):
    """Passes everything on."""

    def __init__(self, inner: KeyValueStore, ranks: Ranks) -> None:
        self.inner = inner
        self.ranks = ranks

    def set_many(self, items: Mapping[str, bytes]) -> None:
        self.inner.set_many(items)

    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        return self.inner.get_many(keys, timeout)

    def delete(self, *keys: str) -> None:
        self.inner.delete(*keys)

    def delete_prefix(self, prefix: str) -> None:
        self.inner.delete_prefix(prefix)


class PartsProbe(NumpyProbe):
    """numpy, of the given parts."""

    def __init__(
        self,
        tensors: type[Tensors] = GoodTensors,
        stager: Callable[[Tensors], Stager] = HostStager,
        ranks: Callable[[Ranks], Ranks] = GoodRanks,
    ) -> None:
        self._tensors, self._stager, self._ranks = tensors, stager, ranks
        self._platform = self._of(SingleRank())

    def _of(self, ranks: Ranks) -> Platform:
        tensors = self._tensors()
        return Platform("parts", ranks, tensors, self._stager(tensors))

    def run_world(self, world_size: int, fn: Callable[[Platform], Any], timeout: float) -> list[Any]:
        return run_world(world_size, fn, timeout=timeout, platform=lambda ranks: self._of(self._ranks(ranks)))


class Meta:
    """A tensor without memory."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape


class MetaTensors(GoodTensors):
    """numpy arrays and `Meta`."""

    def describe(self, value: Any) -> TensorDescription | None:
        if isinstance(value, Meta):
            return TensorDescription(value.dtype, value.shape, Replicated(), has_memory=False)
        return super().describe(value)

    def local_shards(self, value: Any) -> list[LocalShard]:
        if isinstance(value, Meta):
            return [LocalShard((0,) * len(value.shape), value.shape, value)]
        return super().local_shards(value)

    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        return np.empty(description.shape, numpy_dtype(description.dtype))

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        return None if isinstance(shard.data, Meta) else super().storage_key(shard)


class MetaProbe(PartsProbe):
    """numpy with tensors that have no memory yet."""

    def __init__(self, tensors: type[Tensors] = MetaTensors) -> None:
        super().__init__(tensors)

    def meta(self, dtype: str, shape: tuple[int, ...]) -> Any:
        return Meta(dtype, shape)


class Stream:
    """Work that was queued and runs when somebody waits for it, as late as possible."""

    def __init__(self) -> None:
        self._queued: list[Callable[[], None]] = []

    def queue(self, work: Callable[[], None]) -> None:
        self._queued.append(work)

    def run(self) -> None:
        while self._queued:
            self._queued.pop(0)()


class DeviceTensors(GoodTensors):
    """Not to be seen from the host."""

    def host_view(self, shard: LocalShard) -> Carrier | None:
        return None

    def writable(self, shard: LocalShard) -> Carrier | None:
        return None


class DeviceStager(HostStager):
    """Copies of numpy arrays that pose as device memory, in order with the stream."""

    def __init__(self, tensors: Tensors, stream: Stream) -> None:
        super().__init__(GoodTensors())
        self.stream = stream

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        self.stream.run()
        return super().copy_out(shard, buffer)

    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        self.stream.run()
        return super().copy_in(buffer, shard)


class DeviceProbe(PartsProbe):
    """numpy arrays that pose as device memory: `overwrite` is queued."""

    def __init__(self, stager: type[DeviceStager] = DeviceStager) -> None:
        self._stream = Stream()
        super().__init__(DeviceTensors, lambda tensors: stager(tensors, self._stream))

    def raw(self, value: Any) -> bytes:
        self._stream.run()
        return super().raw(value)

    def overwrite(self, value: Any, data: bytes) -> None:
        self._stream.queue(lambda: NumpyProbe.overwrite(self, value, data))


class Late:
    """A Pending that does its work when it is waited for."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def wait(self) -> None:
        self._work()


__all__ = [
    "DeviceProbe",
    "DeviceStager",
    "Done",
    "GoodKeyValueStore",
    "GoodRanks",
    "GoodTensors",
    "Late",
    "Meta",
    "MetaProbe",
    "MetaTensors",
    "PartsProbe",
]
