"""Targets of another dtype than the saved one: staged as they were saved, and converted on their way in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_ckpt.contracts.platform import (
    ByteBuffer,
    Carrier,
    Done,
    HostTensor,
    LocalShard,
    Pending,
    Stager,
    TensorDescription,
    Tensors,
)
from hyper_ckpt.dtypes import dtype_of

STEP = 1 << 20
"""Elements that are converted at once."""
_ALIGNED = 64


@dataclass(frozen=True, eq=False)
class Cast:
    """A target, or a shard of one, that is filled with what was saved as another dtype.

    Args:
        target: the tensor, or its LocalShard.
        dtype: as which it was saved.
        to: the target's own.
    """

    target: Any
    dtype: str
    to: str


def uncast(value: Any) -> Any:
    """The target itself."""
    return value.target if isinstance(value, Cast) else value


class CastTensors(Tensors):
    """The tensors of a load in which some are a `Cast`: these look like tensors of the saved dtype outside host memory.

    Args:
        inner: knows all others.
    """

    def __init__(self, inner: Tensors) -> None:
        self._inner = inner

    def describe(self, value: Any) -> TensorDescription | None:
        found = self._inner.describe(uncast(value))
        return dataclasses.replace(found, dtype=value.dtype) if found and isinstance(value, Cast) else found

    def local_shards(self, value: Any) -> list[LocalShard]:
        shards = self._inner.local_shards(uncast(value))
        if not isinstance(value, Cast):
            return shards
        return [LocalShard(s.offsets, s.sizes, Cast(s, value.dtype, value.to)) for s in shards]

    def host_view(self, shard: LocalShard) -> Carrier | None:
        return None if isinstance(shard.data, Cast) else self._inner.host_view(shard)

    def writable(self, shard: LocalShard) -> Carrier | None:
        view = self._inner.writable(_own(shard))
        return None if isinstance(shard.data, Cast) else view

    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return self._inner.fingerprint([*map(_own, shards)])

    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        return self._inner.empty(description, uncast(like))

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        key = self._inner.storage_key(_own(shard))
        return (key, shard.data.dtype) if key is not None and isinstance(shard.data, Cast) else key

    def plain(self, value: Any) -> HostTensor | None:
        return None if isinstance(value, Cast) else self._inner.plain(value)

    def cast(self, values: Carrier, dtype: str, to: str) -> Carrier:
        return self._inner.cast(values, dtype, to)

    def before_writes(self, values: Sequence[Any]) -> None:
        self._inner.before_writes([*map(uncast, values)])


class CastStager(Stager):
    """Converts what is copied into a shard of a `Cast`.

    Args:
        inner: moves all others.
        tensors: whose shards they are.
    """

    def __init__(self, inner: Stager, tensors: Tensors) -> None:
        self._inner, self._tensors = inner, tensors

    def buffer(self, nbytes: int) -> ByteBuffer:
        return self._inner.buffer(nbytes)

    def release(self, buffer: ByteBuffer) -> None:
        self._inner.release(buffer)

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        return self._inner.copy_out(shard, buffer)

    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        if not isinstance(shard.data, Cast):
            return self._inner.copy_in(buffer, shard)
        count, to = math.prod(shard.sizes), dtype_of(shard.data.to)
        nbytes = count * dtype_of(shard.data.dtype).itemsize
        view = self._tensors.writable(_own(shard))
        if view is not None:
            for at, part in self._converted(buffer[:nbytes], shard.data):
                # The iterator of an array goes on over any strides.
                (view.reshape(-1) if view.flags.c_contiguous else view.flat)[at : at + len(part)] = part
            return Done()
        room = buffer[_aligned(nbytes) :]
        converted = room[: count * to.itemsize].view(to.carrier)
        for at, part in self._converted(buffer[:nbytes], shard.data):
            converted[at : at + len(part)] = part
        return self._inner.copy_in(room, _own(shard))

    def _converted(self, data: ByteBuffer, cast: Cast) -> Iterator[tuple[int, Carrier]]:
        """Converted elements a part at a time, each with the number of the first."""
        values = data.view(dtype_of(cast.dtype).carrier)
        for at in range(0, len(values), STEP):
            yield at, self._tensors.cast(values[at : at + STEP], cast.dtype, cast.to)


def host_memory(tensors: Tensors, shard: LocalShard) -> Carrier | None:
    """The host memory that a shard of a `Cast` is converted into, if it lies there."""
    return tensors.host_view(_own(shard)) if isinstance(shard.data, Cast) else None


def staging_bytes(shard: LocalShard, nbytes: int, converts: Carrier | None) -> int:
    """What it takes to stage a shard: where it is converted outside host memory, both forms of it."""
    if not isinstance(shard.data, Cast) or converts is not None:
        return nbytes
    return _aligned(nbytes) + math.prod(shard.sizes) * dtype_of(shard.data.to).itemsize


def _own(shard: LocalShard) -> LocalShard:
    """The shard of the target itself."""
    return shard.data.target if isinstance(shard.data, Cast) else shard


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
