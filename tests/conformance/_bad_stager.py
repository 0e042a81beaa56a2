"""For each check of the stager, one that breaks what it is about."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_ckpt.builtin.host_stager import HostStager
from hyper_ckpt.contracts.platform import ByteBuffer, Done, LocalShard, Pending, Stager, Tensors
from hyper_ckpt.testing.conformance.probe import PlatformProbe

from ._parts import DeviceProbe, DeviceStager, GoodTensors, Late, PartsProbe


class SmallBuffers(HostStager):
    def buffer(self, nbytes: int) -> ByteBuffer:
        return np.empty(max(nbytes - 1, 0), np.uint8)

    def release(self, buffer: ByteBuffer) -> None:
        return None


class FreshBuffers(SmallBuffers):
    def buffer(self, nbytes: int) -> ByteBuffer:
        return np.empty(nbytes, np.uint8)


class OneBuffer(SmallBuffers):
    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.one = np.empty(1 << 20, np.uint8)

    def buffer(self, nbytes: int) -> ByteBuffer:
        return self.one


class OneBufferForThreads(HostStager):
    """The main thread's buffers are fine."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.one = np.empty(1 << 20, np.uint8)

    def buffer(self, nbytes: int) -> ByteBuffer:
        return super().buffer(nbytes) if threading.current_thread() is threading.main_thread() else self.one

    def release(self, buffer: ByteBuffer) -> None:
        if buffer is not self.one:
            super().release(buffer)


class Columns(HostStager):
    """Column-major."""

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        data = shard.data.tobytes(order="F")
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return Done()


class OutForgetsStrides(HostStager):
    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        dense = np.empty(shard.sizes, shard.data.dtype).strides
        data = np.lib.stride_tricks.as_strided(shard.data, shard.sizes, dense).tobytes()
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return Done()


class ForgetsScalars(HostStager):
    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        return super().copy_in(buffer, shard) if shard.sizes else Done()


class InLosesStrided(HostStager):
    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        flat = shard.data.reshape(-1)  # a copy, where the tensor is strided
        flat[...] = buffer[: flat.nbytes].view(flat.dtype)
        return Done()


class OutIgnoresTheStream(DeviceStager):
    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        return HostStager.copy_out(self, shard, buffer)


class InIgnoresTheStream(DeviceStager):
    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        return HostStager.copy_in(self, buffer, shard)


class WaitReturnsEarly(DeviceStager):
    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        self.stream.queue(lambda: HostStager.copy_out(self, shard, buffer) and None)
        return Done()


class InComesLate(DeviceStager):
    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        return Late(lambda: HostStager.copy_in(self, buffer, shard))


class WritesToTheLastBuffer(HostStager):
    last: Any = None

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        if self.last is not None and self.last.nbytes >= shard.data.nbytes:
            super().copy_out(shard, self.last)
        self.last = buffer
        return super().copy_out(shard, buffer)


class OneSlot(HostStager):
    """Only the copy that was started last is made."""

    slot: Any = None

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        self.slot = (shard, buffer)
        return Late(lambda: HostStager.copy_out(self, *self.slot))


class WaitsInOneThread(HostStager):
    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        starter = threading.get_ident()
        buffer[...] = 0
        copy = super().copy_out
        return Late(lambda: copy(shard, buffer) if threading.get_ident() == starter else None)


Pair = tuple[Callable[[], PlatformProbe], Callable[[], PlatformProbe]]


def of(stager: Callable[[Tensors], Stager]) -> Pair:
    return (lambda: PartsProbe(GoodTensors, stager)), PartsProbe


def on_device(stager: type[DeviceStager]) -> Pair:
    return (lambda: DeviceProbe(stager)), DeviceProbe


BAD_STAGERS: dict[str, Pair] = {
    "buffers_are_large_enough": of(SmallBuffers),
    "buffers_in_use_are_apart": of(OneBuffer),
    "released_buffers_are_reused": of(FreshBuffers),
    "buffers_from_several_threads": of(OneBufferForThreads),
    "copy_out_gives_the_bytes": of(Columns),
    "copy_out_of_strided_tensors": of(OutForgetsStrides),
    "copy_in_sets_the_tensor": of(ForgetsScalars),
    "copy_in_to_strided_tensors": of(InLosesStrided),
    "copy_out_follows_earlier_work": on_device(OutIgnoresTheStream),
    "copy_out_is_complete_after_wait": on_device(WaitReturnsEarly),
    "a_buffer_in_use_is_left_alone": of(WritesToTheLastBuffer),
    "copy_in_follows_earlier_work": on_device(InIgnoresTheStream),
    "later_work_follows_copy_in": on_device(InComesLate),
    "several_copies_in_flight": of(OneSlot),
    "waiting_in_another_thread": of(WaitsInOneThread),
}
