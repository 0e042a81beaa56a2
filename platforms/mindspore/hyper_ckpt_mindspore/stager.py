"""Staging between device memory and host buffers."""

from __future__ import annotations

import math

import mindspore as ms

from hyper_ckpt.builtin.host_stager import HostStager
from hyper_ckpt.contracts.platform import ByteBuffer, Done, LocalShard, Pending, Tensors
from hyper_ckpt_mindspore.devices import Device
from hyper_ckpt_mindspore.tensors import check_target


class MindSporeStager(HostStager):
    """Every copy is complete when the call returns.

    `copy_out` and `copy_in` are called in the thread that calls MindSpore; `buffer` and `release` in any: a second
    thread that calls MindSpore beside the training would wait for it without end.

    Args:
        tensors: of the platform: reads and writes what is in host memory.
        device: moves what is not.
    """

    def __init__(self, tensors: Tensors, device: Device) -> None:
        super().__init__(tensors)
        self._device = device

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        tensor = shard.data
        if not isinstance(tensor, ms.Tensor) or self._device.on_host(tensor):
            return super().copy_out(shard, buffer)
        if nbytes := _nbytes(tensor):
            self._device.copy_out(tensor, buffer[:nbytes])
        return Done()

    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        tensor = shard.data
        if not isinstance(tensor, ms.Tensor) or self._device.on_host(tensor):
            return super().copy_in(buffer, shard)
        check_target(tensor, on_host=False)
        if nbytes := _nbytes(tensor):
            self._device.copy_in(buffer[:nbytes], tensor)
        return Done()


def _nbytes(tensor: ms.Tensor) -> int:
    return int(math.prod(tensor.shape) * tensor.itemsize)
