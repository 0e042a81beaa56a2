"""Copies between device memory and pinned host buffers, on a stream of our own."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hyper_ckpt.builtin.host_stager import BufferPool, HostStager
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import ByteBuffer, LocalShard, Pending, Stager
from hyper_ckpt_sample import device
from hyper_ckpt_sample.framework import Tensor


@dataclass(frozen=True)
class _Copy:
    """A copy that was queued. Holds what it works on until it is complete."""

    event: device.Event
    tensor: Tensor
    buffer: ByteBuffer

    def wait(self) -> None:
        self.event.synchronize()


class SampleStager(Stager):
    """Copies run beside the caller's work, after what was queued before them."""

    def __init__(self) -> None:
        self._numpy = HostStager(NumpyTensors())
        self._pool = BufferPool(device.pinned)
        self._streams: dict[device.Device, device.Stream] = {}
        self._lock = threading.Lock()

    def buffer(self, nbytes: int) -> ByteBuffer:
        return self._pool.take(nbytes)

    def release(self, buffer: ByteBuffer) -> None:
        self._pool.give(buffer)

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        if not isinstance(shard.data, Tensor):
            return self._numpy.copy_out(shard, buffer)
        memory = shard.data.span.memory
        stream = self._stream(memory.device)
        stream.wait_stream(device.current_stream(memory.device))  # what writes the tensor
        with device.on(stream):
            device.copy_to_host(shard.data.span, buffer)
        memory.keep_for(stream)
        return _Copy(stream.record_event(), shard.data, buffer)

    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        if not isinstance(shard.data, Tensor):
            return self._numpy.copy_in(buffer, shard)
        memory = shard.data.span.memory
        stream, caller = self._stream(memory.device), device.current_stream(memory.device)
        stream.wait_stream(caller)  # what still reads the tensor
        with device.on(stream):
            device.copy_from_host(buffer, shard.data.span)
        memory.keep_for(stream)
        caller.wait_stream(stream)  # what comes after the load
        return _Copy(stream.record_event(), shard.data, buffer)

    def _stream(self, on: device.Device) -> device.Stream:
        with self._lock:
            return self._streams.setdefault(on, device.Stream(on))
