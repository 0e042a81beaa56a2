"""A device for torch that runs everything as late as the rules allow; wrong accelerators that break one rule each.

CPU tensors stand for device memory. Under `LateTorch`, torch's operations are queued on the current stream of
hyper_ckpt_sample.device, and give old bytes to whoever does not wait.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_ckpt.contracts.platform import LocalShard, Pending
from hyper_ckpt_sample import device as chips
from hyper_ckpt_sample.device import Device, Event, Memory, Stream
from hyper_ckpt_torch.devices import Accelerator
from hyper_ckpt_torch.stager import TorchStager

_RUNNING = threading.local()
_BLOCKS: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def at_once():
    """torch runs at once in here, as what the device does."""
    before, _RUNNING.now = getattr(_RUNNING, "now", False), True
    try:
        yield
    finally:
        _RUNNING.now = before


class LateTorch(TorchDispatchMode):
    """Queues this thread's torch operations on its current stream. Views are made at once: they touch no memory."""

    def __init__(self, chip: Device) -> None:
        super().__init__()
        self.chip = chip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(_RUNNING, "now", False):
            return func(*args, **kwargs)
        operands = [_unowned(each) if isinstance(each, torch.Tensor) else each for each in args]
        if func._schema.is_mutable:
            self._queue(lambda: func(*operands, **kwargs), args[0])
            return args[0]
        out = func(*args, **kwargs)
        if func.is_view or not any(isinstance(each, torch.Tensor) for each in args):
            return out
        with at_once():
            out.view(torch.uint8).fill_(chips.POISON)
        self._queue(lambda: out.copy_(func(*operands, **kwargs)), out)
        return out

    def _queue(self, run: Callable[[], object], written: torch.Tensor) -> None:
        inference = written.is_inference()

        def operation() -> None:
            with at_once(), torch.inference_mode(inference), torch.no_grad():
                run()

        chips.current_stream(self.chip).submit(operation)


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, but not kept: an operation that is queued does not keep a device's memory from being freed."""
    memory = _BLOCKS.get(tensor.untyped_storage().data_ptr())
    if memory is None:
        return tensor
    with at_once():
        cells = torch.from_numpy(memory.cells).view(tensor.dtype)
        alias = cells.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        alias = alias.conj() if tensor.is_conj() else alias
        return torch._neg_view(alias) if tensor.is_neg() else alias


class Owner(np.ndarray):
    """An array that keeps the block it lies in, so that a torch tensor over it does."""

    memory: Memory | None = None


def on_device(chip: Device, values: np.ndarray) -> torch.Tensor:
    """A tensor in memory of the chip, complete."""
    memory = chips.allocate(values.nbytes, chip)
    array = memory.cells[: values.nbytes].view(Owner)
    array.memory = memory
    _BLOCKS[memory.cells.__array_interface__["data"][0]] = memory
    tensor = torch.from_numpy(array)
    with at_once():
        tensor.copy_(torch.from_numpy(values.reshape(-1).view(np.uint8).copy()))
        return tensor.view(getattr(torch, values.dtype.name)).view(values.shape)


class LateAccelerator(Accelerator):
    """The chip as torch's device module would show it."""

    def __init__(self, chip: Device) -> None:
        super().__init__(None)
        self.chip = chip
        self.made: list[Stream] = []

    def new_stream(self, device):
        self.made.append(Stream(self.chip))
        return self.made[-1]

    def current_stream(self, device):
        return chips.current_stream(self.chip)

    def on(self, stream):
        return chips.on(stream)

    def keep_for(self, tensor, stream):
        memory = _BLOCKS.get(tensor.untyped_storage().data_ptr())
        if memory is not None:
            memory.keep_for(stream)


class HastyStream(Stream):
    """Begins before the caller's work is done."""

    def wait_stream(self, other):
        pass


class UnorderedCopies(LateAccelerator):
    """The side stream does not wait for the caller's."""

    def new_stream(self, device):
        return HastyStream(self.chip)


class UnorderedCaller(LateAccelerator):
    """The caller's stream does not wait for the side stream. What the side stream waits for is left as it is."""

    def current_stream(self, device):
        hasty, real = HastyStream(self.chip), chips.current_stream(self.chip)
        hasty.record_event = real.record_event
        return hasty


class Forgetful(LateAccelerator):
    """Does not tell the allocator."""

    def keep_for(self, tensor, stream):
        pass


class EarlyEvents(LateAccelerator):
    """Events come to pass before the copy."""

    def new_stream(self, device):
        class EarlyStream(Stream):
            def record_event(self) -> Event:
                return Event(self, self._submitted - 1)

        return EarlyStream(self.chip)


def stager_of(accelerator: Accelerator) -> TorchStager:
    return TorchStager(lambda device: accelerator)


def whole(tensor: torch.Tensor) -> LocalShard:
    return LocalShard((0,) * tensor.ndim, tuple(tensor.shape), tensor)


def start_out(stager: TorchStager, tensor: torch.Tensor) -> tuple[np.ndarray, Pending]:
    buffer = stager.buffer(tensor.nbytes)
    buffer[:] = 0xA5  # what memory held before could be what the copy should bring
    return buffer, stager.copy_out(whole(tensor), buffer)


def start_in(stager: TorchStager, tensor: torch.Tensor, data: np.ndarray) -> Pending:
    buffer = stager.buffer(data.nbytes)
    buffer[: data.nbytes] = data.reshape(-1).view(np.uint8)
    return stager.copy_in(buffer, whole(tensor))


def floats(value: float, n: int = 64) -> np.ndarray:
    return np.full(n, value, np.float32)


def now(tensor: torch.Tensor) -> list[float]:
    """What the device's memory holds at this moment."""
    with at_once():
        return sorted(set(tensor.flatten().tolist()))
