"""Collectives of one MindSpore group: mccl on the CPU, hccl on Ascend.

Bytes only: mccl has no bool, int16 or complex tensors. What MindSpore offers for objects and single peers is not used:
on the CPU most of it looks for a group by the name it has on Ascend.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import mindspore.communication as communication
import mindspore.mint.distributed as dist
import numpy as np
from mindspore.communication import GlobalComm
from mindspore.communication._comm_helper import _get_group_map

from hyper_ckpt.contracts.platform import ByteBuffer, packed, unpacked
from hyper_ckpt.errors import RankFailedError
from hyper_ckpt_mindspore.devices import array_of, finish, tensor_over

# Larger broadcasts are slower.
CHUNK = 1 << 20
# What a gather or scatter holds at once, at rank 0; bounds also each rank's piece of it, which is at most a chunk.
_ROUND_BYTES = 64 << 20
# What everybody sends along with the size of what it has: most messages are small, and each collective takes a while.
_SIZE, _HEAD = 8, 1016
# HCCL takes two such buffers of device memory per group, 200 MB each if not told otherwise.
_HCCL_BUFFER_MB = 16


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError(
            "a collective of MindSpore failed: a rank has ended, cannot be reached or came too late (30 s on the CPU). "
            "Collectives after it are out of step: end the job on all ranks and start it again"
        ) from error


@dataclass(frozen=True)
class Sent:
    """Broadcasts under way: handles, and tensors with the arrays whose bytes they bring."""

    handles: tuple[Any, ...]
    parts: tuple[tuple[ms.Tensor, ByteBuffer], ...]

    def wait(self) -> None:
        with _failures_named():
            for handle in self.handles:
                if handle is not None:
                    handle.wait()
            finish()
            for tensor, array in self.parts:
                _bring(tensor, array)


class Group:
    """Collectives of a MindSpore group; members count from 0 in its order.

    Args:
        name: the group exists, and this process is in it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ranks = tuple(dist.get_process_group_ranks(name))
        self.size = len(self.ranks)
        self.member = self.ranks.index(dist.get_rank())

    @_failures_named()
    def all_gather_object(self, value: Any) -> list[Any]:
        """Everybody's value. What does not fit into the first message is padded to the largest."""
        data = packed(value)
        sizes, parts = self._heads(data)
        if max(sizes) > _HEAD:
            rests = self._all_gather(_padded(data[_HEAD:], max(sizes) - _HEAD))
            parts = [part + rest.tobytes() for part, rest in zip(parts, rests, strict=True)]
        return [unpacked(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    @_failures_named()
    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Everybody's bytes at member 0; what does not fit into the first message in rounds of equal pieces."""
        sizes, heads = self._heads(data)
        gathered = [bytearray(head) for head in heads]
        for start, length in self._rounds(_HEAD, max(sizes)):
            parts = self._gather(_padded(data[start : start + length], length))
            if self.member == 0:
                for whole, part in zip(gathered, parts, strict=True):
                    whole += part.data
        return [bytes(whole[:size]) for whole, size in zip(gathered, sizes, strict=True)] if self.member == 0 else None

    @_failures_named()
    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        """Part m of member 0's `parts` at member m, in rounds of equal pieces."""
        sizes = np.array([len(part) for part in parts or ()] or [0] * self.size, np.int64)
        Sent(*self._broadcast([sizes.view(np.uint8)], 0)).wait()
        own = bytearray()
        for start, length in self._rounds(0, int(sizes.max())):
            rows = [_padded(part[start : start + length], length) for part in parts or ()]
            own += self._scatter(rows, length).data
        return bytes(own[: int(sizes[self.member])])

    @_failures_named()
    def broadcast(self, buffers: Sequence[ByteBuffer], source: int) -> Sent:
        """Member `source`'s buffers into everybody's, in place."""
        return Sent(*self._broadcast(buffers, source))

    def _rounds(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Start and length of each round for bytes `begin` to `end` of everybody's."""
        step = min(CHUNK, max(_ROUND_BYTES // self.size, 1 << 12))
        for start in range(begin, end, step):
            yield start, min(step, end - start)

    def _broadcast(self, buffers: Sequence[ByteBuffer], source: int) -> tuple[tuple[Any, ...], Any]:
        handles, parts = [], []
        for buffer in buffers:
            array = buffer if buffer.flags.writeable else np.array(buffer)  # only a source may be read-only
            for start in range(0, array.size, CHUNK):
                part = array[start : start + CHUNK]
                tensor = tensor_over(part)
                handles.append(dist.broadcast(tensor, self.ranks[source], self.name, True))
                parts.append((tensor, part))
        return tuple(handles), tuple(parts)

    def _heads(self, data: bytes) -> tuple[list[int], list[bytes]]:
        """How many bytes everybody has, and the first ones, padded."""
        rows = self._all_gather(_padded(len(data).to_bytes(_SIZE, "little") + data[:_HEAD], _SIZE + _HEAD))
        return [int.from_bytes(row[:_SIZE].tobytes(), "little") for row in rows], [
            row[_SIZE:].tobytes() for row in rows
        ]

    def _all_gather(self, own: ByteBuffer) -> list[ByteBuffer]:
        arrays, tensors = self._targets(self.size, own.size)
        dist.all_gather(tensors, tensor_over(own), self.name)
        return _brought(tensors, arrays)

    def _gather(self, own: ByteBuffer) -> list[ByteBuffer]:
        # All have to give targets, only member 0's are filled.
        arrays, tensors = self._targets(self.size if self.member == 0 else 1, own.size)
        targets = tensors if self.member == 0 else tensors * self.size
        dist.gather(tensor_over(own), targets, self.ranks[0], self.name)
        return _brought(tensors, arrays)

    def _scatter(self, rows: list[ByteBuffer], length: int) -> ByteBuffer:
        (array,), (tensor,) = self._targets(1, length)
        # All have to give sources, only member 0's are sent.
        sources = [tensor_over(row) for row in rows] or [tensor_over(np.zeros(length, np.uint8))] * self.size
        dist.scatter(tensor, sources, self.ranks[0], self.name)
        return _brought([tensor], [array])[0]

    def _targets(self, count: int, length: int) -> tuple[list[ByteBuffer], list[ms.Tensor]]:
        arrays: list[ByteBuffer] = [np.zeros(length, np.uint8) for _ in range(count)]
        return arrays, [tensor_over(array) for array in arrays]


def _padded(data: bytes, length: int) -> ByteBuffer:
    """`data` and zeros behind it, `length` bytes in all."""
    padded: ByteBuffer = np.zeros(length, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return padded


def _brought(tensors: list[ms.Tensor], arrays: list[ByteBuffer]) -> list[ByteBuffer]:
    finish()
    for tensor, array in zip(tensors, arrays, strict=True):
        _bring(tensor, array)
    return arrays


def _bring(tensor: ms.Tensor, array: ByteBuffer) -> None:
    """Copies what a collective left in the tensor; on the CPU that is the array's own memory."""
    result = array_of(tensor)
    if result.__array_interface__["data"][0] != array.__array_interface__["data"][0]:
        np.copyto(array, result)


def world_name() -> str:
    """The name of the world group, known only after MindSpore was initialised."""
    return str(GlobalComm.WORLD_COMM_GROUP)


def group_of(ranks: Sequence[int]) -> Group:
    """The group of these ranks of MindSpore, sorted; made by its members only, once per process.

    On Ascend an existing group of the same ranks is used, since each takes device memory.
    """
    existing: dict[str, list[int]] = _get_group_map()
    name = f"hyper_ckpt_{hashlib.sha256(np.asarray(ranks, '<i8').tobytes()).hexdigest()[:32]}"
    on_device = ms.get_context("device_target") != "CPU"
    if name not in existing and on_device:
        name = next((other for other, members in existing.items() if list(members) == list(ranks)), name)
    if name not in existing:
        with _failures_named():
            communication.create_group(name, list(ranks), *([_small_buffers()] if on_device else []))
    return Group(name)


def _small_buffers() -> Any:
    from mindspore._c_expression import GroupOptions

    options = GroupOptions()
    options.hccl_config = {"hccl_buffer_size": _HCCL_BUFFER_MB}
    return options
