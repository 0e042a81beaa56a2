"""A small framework on the simulated device, in place of yours: tensors, shardings by named axes, a process group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hyper_ckpt_sample import device

# Item sizes by name. "f4x2" is here so that the plugin has something to refuse.
DTYPES = {
    "bool": 1, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, "f8e4m3": 1, "f8e5m2": 1, "f4x2": 1,
}  # fmt: skip
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Tensor:
    """Elements in device memory.

    Args:
        dtype: a name of `DTYPES`.
        shape, strides: in elements.
        memory: None for a tensor that is only described.
        offset: in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    memory: device.Memory | None
    offset: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.itemsize

    @property
    def span(self) -> device.Span:
        """Where the elements lie.

        Raises:
            ValueError: the tensor has no memory.
        """
        if self.memory is None:
            raise ValueError("a tensor that is only described has no memory")
        steps = tuple(step * self.itemsize for step in self.strides)
        return device.Span(self.memory, self.itemsize, self.offset * self.itemsize, self.shape, steps)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row-major in one run."""
        wanted = row_major(self.shape)
        return not self.size or all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, wanted, strict=True))

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        """A view: one slice with positive step per dimension."""
        shape, strides, offset = [], [], self.offset
        for index, length, step in zip(slices, self.shape, self.strides, strict=True):
            start, stop, by = index.indices(length)
            shape.append(len(range(start, stop, by)))
            strides.append(step * by)
            offset += start * step
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def transpose(self) -> Tensor:
        """A view with the dimensions in reverse order."""
        return replace(self, shape=self.shape[::-1], strides=self.strides[::-1])

    def broadcast(self, length: int) -> Tensor:
        """A view with a new first dimension, along which all elements are the same memory."""
        return replace(self, shape=(length, *self.shape), strides=(0, *self.strides))

    def alias(self) -> Tensor:
        """Another tensor over the same memory."""
        return replace(self)

    def contiguous(self) -> Tensor:
        """The tensor itself, or a row-major copy of it."""
        if self.is_contiguous:
            return self
        out = empty(self.dtype, self.shape, on=self.span.memory.device)
        out.copy_(self)
        return out

    def copy_(self, source: Tensor) -> None:
        """Copies elements on the device; queued."""
        device.copy(source.span, self.span)

    def set_bytes(self, data: bytes) -> None:
        """Copies row-major elements from the host; queued."""
        device.copy_from_host(np.frombuffer(data, np.uint8), self.span)

    def to_host(self) -> bytes:
        """The elements, row-major, once everything on the device has run."""
        host = device.pinned(self.nbytes)
        span = self.span
        device.synchronize(span.memory.device)
        device.copy_to_host(span, host)
        device.current_stream(span.memory.device).synchronize()
        return host.tobytes()


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    return tuple(itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1] if shape else ()


def empty(dtype: str, shape: tuple[int, ...], on: device.Device | None = None) -> Tensor:
    """A tensor of whatever was in the memory; `on` None is device 0."""
    memory = device.allocate(math.prod(shape) * DTYPES[dtype], on or device.device())
    return Tensor(dtype, shape, row_major(shape), memory)


def described(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor without memory."""
    return Tensor(dtype, shape, row_major(shape), None)


def from_host(dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    """A tensor of row-major elements; they are in place when this returns."""
    out = empty(dtype, shape)
    out.set_bytes(data)
    device.current_stream(device.device()).synchronize()
    return out


@dataclass(frozen=True)
class Sharding:
    """How a tensor lies over ranks, by named axes.

    Args:
        axes: name and length of each; ranks are numbered row-major over them.
        spec: for each tensor dimension the axes that cut it, the slowest first: a name, several, or None.
            n ranks along them cut into pieces of ceil(length / n), the last ones shorter or empty.
        first_rank: ranks `first_rank` .. `first_rank` + product of `axes` - 1 take part.
    """

    axes: tuple[tuple[str, int], ...]
    spec: tuple[str | tuple[str, ...] | None, ...]
    first_rank: int = 0

    def names(self, dim: int) -> tuple[str, ...]:
        """The axes that cut a tensor dimension."""
        entry = self.spec[dim]
        return () if entry is None else (entry,) if isinstance(entry, str) else entry

    def box(self, shape: tuple[int, ...], rank: int) -> Box | None:
        """Offsets and sizes of a rank's part; None if it takes no part."""
        lengths = dict(self.axes)
        if not 0 <= rank - self.first_rank < math.prod(lengths.values()):
            return None
        at = np.unravel_index(rank - self.first_rank, tuple(lengths.values())) if lengths else ()
        place = dict(zip(lengths, map(int, at), strict=True))
        offsets, sizes = [], []
        for dim, length in enumerate(shape):
            number, parts = 0, 1
            for name in self.names(dim):
                number, parts = number * lengths[name] + place[name], parts * lengths[name]
            piece = -(-length // parts)
            offsets.append(min(number * piece, length))
            sizes.append(min(piece, length - offsets[-1]))
        return tuple(offsets), tuple(sizes)


@dataclass(frozen=True, eq=False)
class Sharded:
    """One rank's part of a tensor. `local` is empty on a rank that takes no part; `shape` is that of the whole."""

    local: Tensor
    shape: tuple[int, ...]
    sharding: Sharding


def shard(dtype: str, shape: tuple[int, ...], data: bytes, sharding: Sharding, rank: int) -> Sharded:
    """A rank's part of a whole tensor, given as row-major bytes."""
    offsets, sizes = sharding.box(shape, rank) or ((0,) * len(shape), (0,) * len(shape))
    whole = np.frombuffer(data, f"V{DTYPES[dtype]}").reshape(shape)
    part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    return Sharded(from_host(dtype, sizes, part.tobytes()), shape, sharding)


@dataclass(frozen=True, eq=False)
class ProcessGroup:
    """The ranks of a job. Rank 0 may listen on `address`:`port`. `secret` is known to this job's ranks alone."""

    rank: int
    world_size: int
    address: str
    port: int
    secret: str = "simulated"


_group: ProcessGroup | None = None


def init_process_group(rank: int, world_size: int, port: int, address: str = "127.0.0.1") -> None:
    """Says which rank this process is; connects nothing."""
    global _group
    _group = ProcessGroup(rank, world_size, address, port)


def process_group() -> ProcessGroup | None:
    """The group of this process, None if there is none."""
    return _group


def destroy_process_group() -> None:
    """Forgets the group."""
    global _group
    _group = None
