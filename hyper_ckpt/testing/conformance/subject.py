"""What the checks of a platform work on, and the tensors that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, LocalShard, Platform, Ranks, Stager, Tensors
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.testing.conformance.check import NotApplicable, expect
from hyper_ckpt.testing.conformance.probe import PlatformProbe

Shape = tuple[int, ...]

SHAPES: tuple[Shape, ...] = ((), (0,), (3, 0, 2), (1,), (5,), (3, 4), (2, 3, 5))
STRIDED_SHAPES: tuple[Shape, ...] = ((7,), (3, 4), (2, 3, 5))
LARGE: Shape = (600, 1000)  # above 1 MiB in every dtype of two bytes and more


@dataclass(frozen=True)
class Subject:
    """One platform under test, on one rank.

    Args:
        folder: that the check may use; the same on all ranks.
        timeout: seconds for saves and loads that are to succeed.
        active_before: what `active` of each announced platform said before this process joined the world; None where
            it joined none.
    """

    probe: PlatformProbe
    platform: Platform
    folder: Path
    timeout: float = 60.0
    active_before: dict[str, int] | None = None

    @property
    def tensors(self) -> Tensors:
        """The platform's `Tensors`."""
        return self.platform.tensors

    @property
    def stager(self) -> Stager:
        """The platform's `Stager`."""
        return self.platform.stager

    @property
    def ranks(self) -> Ranks:
        """The platform's `Ranks`."""
        return self.platform.ranks

    @property
    def dtype(self) -> str:
        """The dtype for checks that need only one."""
        return "float32" if "float32" in self.probe.dtypes else self.probe.dtypes[0]

    @property
    def wide(self) -> str:
        """A dtype of at least two bytes, for tensors above 1 MiB."""
        found = [name for name in (self.dtype, *self.probe.dtypes) if dtype_of(name).itemsize > 1]
        if not found:
            raise NotApplicable("every dtype of this platform has one byte")
        return found[0]

    def cases(self) -> Iterator[tuple[str, Shape, bytes]]:
        """Every dtype in every shape, with bytes for it."""
        for dtype in self.probe.dtypes:
            for shape in SHAPES:
                yield dtype, shape, content(dtype, shape)

    def strided(self, dtype: str, shape: Shape, data: bytes) -> Any:
        """A strided tensor, where the framework has one."""
        value = self.probe.strided(dtype, shape, data)
        if value is None:
            raise NotApplicable("the framework has no strided views (PlatformProbe.strided)")
        return value

    def shard(self, value: Any) -> LocalShard:
        """The one shard of a plain tensor."""
        shards = self.tensors.local_shards(value)
        expect(
            len(shards) == 1,
            "a plain tensor has one local shard, all of it",
            f"{len(shards)} shards",
            "Tensors.local_shards returns [LocalShard((0, ...), shape, data)] for it",
        )
        return shards[0]

    def copied_out(self, value: Any, nbytes: int) -> bytes:
        """The bytes of a plain tensor by way of the stager."""
        return copied_out(self.stager, self.shard(value), nbytes)

    def copy_in(self, value: Any, data: bytes) -> None:
        """Sets a plain tensor by way of the stager."""
        buffer = filled(self.stager, data)
        self.stager.copy_in(buffer, self.shard(value)).wait()
        self.stager.release(buffer)

    def put(self, value: Any, data: bytes) -> None:
        """Sets a plain tensor as a load does: through `writable` where that gives a view, else by `copy_in`."""
        view = self.tensors.writable(self.shard(value))
        if view is None:
            self.copy_in(value, data)
        else:
            view[...] = np.frombuffer(data, view.dtype).reshape(view.shape)

    def same(self, value: Any, data: bytes, what: str, change: str) -> None:
        """Fails unless a plain tensor holds `data`, as the probe sees it."""
        same_bytes(self.probe.raw(value), data, what, change)


def content(dtype: str, shape: Shape, seed: int = 0) -> bytes:
    """Bytes for a tensor: any bits where any are an element of the dtype. Different seeds differ from 1 element on."""
    row = dtype_of(dtype)
    nbytes = math.prod(shape) * row.itemsize
    if dtype == "bool":
        return bytes((i + seed) % 2 for i in range(nbytes))
    high = {"int4": 8, "uint4": 16}.get(dtype, 256)  # one element a byte, in its low bits
    data = np.random.default_rng(7).integers(0, high, nbytes, np.uint8)
    return bytes(((data.astype(np.uint16) + seed) % high).astype(np.uint8))


def filled(stager: Stager, data: bytes) -> ByteBuffer:
    """A buffer of the stager that starts with `data`."""
    buffer = stager.buffer(len(data))
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return buffer


def blank(stager: Stager, nbytes: int) -> ByteBuffer:
    """A buffer of the stager for a copy to fill: what memory held before could be what the copy should bring."""
    buffer = stager.buffer(nbytes)
    buffer[:] = 0xA5
    return buffer


def size_of(shard: LocalShard, dtype: str) -> int:
    """Bytes of a shard."""
    return math.prod(shard.sizes) * dtype_of(dtype).itemsize


def copied_out(stager: Stager, shard: LocalShard, nbytes: int) -> bytes:
    """The `nbytes` of a shard by way of the stager."""
    buffer = blank(stager, nbytes)
    stager.copy_out(shard, buffer).wait()
    data = buffer[:nbytes].tobytes()
    stager.release(buffer)
    return data


def same_bytes(got: bytes, wanted: bytes, what: str, change: str) -> None:
    """Fails unless the bytes are equal; shows where they first differ."""
    if got == wanted:
        return
    if len(got) != len(wanted):
        expect(False, f"{what}: {len(wanted):,} bytes", f"{len(got):,} bytes", change)
    a, b = np.frombuffer(got, np.uint8), np.frombuffer(wanted, np.uint8)
    differing = np.flatnonzero(a != b)
    at = int(differing[0])
    expect(
        False,
        what,
        f"{len(differing):,} of {len(wanted):,} bytes differ, the first at {at}: "
        f"{got[at : at + 8].hex(' ')} in place of {wanted[at : at + 8].hex(' ')}",
        change,
    )
