"""Staging between device memory and pinned host buffers, on a stream of our own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hyper_ckpt.builtin.host_stager import BufferPool, HostStager
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import ByteBuffer, Done, LocalShard, Pending, Stager
from hyper_ckpt_torch.devices import Accelerator, accelerator_in_use, accelerator_of
from hyper_ckpt_torch.tensors import bits, bits_dtype, check_target


@dataclass(frozen=True)
class _Copy:
    """A copy that was queued. Holds what it works on until it is complete."""

    event: Any
    tensor: torch.Tensor
    buffer: ByteBuffer

    def wait(self) -> None:
        self.event.synchronize()


class TorchStager(Stager):
    """Copies of device tensors run beside the caller's work; those of host tensors and numpy arrays at once.

    `copy_out` and `copy_in` are called in the thread whose work they follow: torch's current stream
    belongs to the thread. `buffer`, `release` and waiting may happen in any thread.

    Args:
        accelerator: finds the accelerator of a device, None where copies are made at once.
    """

    def __init__(self, accelerator: Callable[[torch.device], Accelerator | None] = accelerator_of) -> None:
        self._accelerator = accelerator
        self._numpy = HostStager(NumpyTensors())
        self._pool = BufferPool(_allocate)
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def buffer(self, nbytes: int) -> ByteBuffer:
        return self._pool.take(nbytes)

    def release(self, buffer: ByteBuffer) -> None:
        self._pool.give(buffer)

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        if not isinstance(shard.data, torch.Tensor):
            return self._numpy.copy_out(shard, buffer)
        tensor = shard.data
        host = _host_tensor(buffer, tensor)

        def copy(non_blocking: bool) -> None:
            # Resolved in here, on our stream: it may take device memory, which belongs to the stream that asked.
            host.copy_(bits(tensor.detach().resolve_conj().resolve_neg()), non_blocking)

        return self._run(copy, tensor, buffer)

    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        if not isinstance(shard.data, torch.Tensor):
            return self._numpy.copy_in(buffer, shard)
        tensor = shard.data
        check_target(tensor)
        host = _host_tensor(buffer, tensor)

        def copy(non_blocking: bool) -> None:
            # A tensor made in inference mode is written to in inference mode only, others never there.
            with torch.inference_mode(tensor.is_inference()):
                bits(tensor.detach()).copy_(host, non_blocking)

        accelerator = self._accelerator(tensor.device)
        pending = self._run(copy, tensor, buffer)
        if accelerator is not None:
            caller = accelerator.current_stream(tensor.device)
            caller.wait_stream(self._stream(accelerator, tensor.device))
        return pending

    def _run(self, copy: Callable[[bool], None], tensor: torch.Tensor, buffer: ByteBuffer) -> Pending:
        accelerator = self._accelerator(tensor.device)
        if accelerator is None:
            copy(False)
            return Done()
        stream = self._stream(accelerator, tensor.device)
        # After everything queued so far: what wrote the tensor and, for copy_in, what still reads it.
        stream.wait_stream(accelerator.current_stream(tensor.device))
        with accelerator.on(stream):
            copy(True)
            event = stream.record_event()
        accelerator.keep_for(tensor, stream)
        return _Copy(event, tensor, buffer)

    def _stream(self, accelerator: Accelerator, device: torch.device) -> Any:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = accelerator.new_stream(device)
            return self._streams[device]


def _allocate(nbytes: int) -> ByteBuffer:
    """A buffer, pinned where a device is in use: pinning would start one in this process otherwise."""
    accelerator = accelerator_in_use()
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if accelerator is None else accelerator.pinned(nbytes)
    array: ByteBuffer = memory.numpy()  # keeps `memory` alive
    return array


def _host_tensor(buffer: ByteBuffer, tensor: torch.Tensor) -> torch.Tensor:
    """The start of `buffer`, as a tensor like `bits(tensor)`."""
    nbytes = math.prod(tensor.shape) * tensor.element_size()
    return torch.from_numpy(buffer[:nbytes]).view(bits_dtype(tensor.dtype)).view(tensor.shape)
