"""The order in which a device stager queues its work, on a device that only keeps a record."""

import contextlib

import numpy as np
import pytest
import torch

from hyper_ckpt.contracts.platform import LocalShard
from hyper_ckpt_torch import devices
from hyper_ckpt_torch.devices import Accelerator
from hyper_ckpt_torch.stager import TorchStager


class RecordedAccelerator(Accelerator):
    """Streams that write down what they are asked; copies run at once, on the CPU."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(None)
        self.log = log
        self.made = 0

    def new_stream(self, device):
        self.made += 1
        return RecordedStream("side", self.log)

    def current_stream(self, device):
        return RecordedStream("caller", self.log)

    @contextlib.contextmanager
    def on(self, stream):
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")

    def keep_for(self, tensor, stream):
        self.log.append(f"keep for {stream.name}")


class RecordedStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.log.append(f"event on {self.name}")
        return self

    def synchronize(self):
        self.log.append("host waits for the event")


@pytest.fixture
def accelerator() -> RecordedAccelerator:
    return RecordedAccelerator([])


def test_copy_out_follows_the_caller_and_does_not_hold_it_up(accelerator):
    stager = TorchStager(lambda device: accelerator)
    tensor = torch.arange(6.0).reshape(2, 3).t()
    buffer = stager.buffer(tensor.nbytes)
    pending = stager.copy_out(LocalShard((0, 0), (3, 2), tensor), buffer)
    assert accelerator.log == [
        "side waits for caller", "enter side", "event on side", "leave side", "keep for side",
    ]  # fmt: skip
    pending.wait()
    assert accelerator.log[-1] == "host waits for the event"
    assert buffer[:24].view(np.float32).tolist() == [0, 3, 1, 4, 2, 5]


def test_copy_in_comes_after_readers_and_before_later_work(accelerator):
    stager = TorchStager(lambda device: accelerator)
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    version = weight._version
    stager.copy_in(np.array([0x80, 0x3F, 0x00, 0x40], np.uint8), LocalShard((0,), (2,), weight.detach())).wait()
    assert accelerator.log[:2] == ["side waits for caller", "enter side"]
    assert accelerator.log[2:-1] == ["event on side", "leave side", "keep for side", "caller waits for side"]
    assert weight.tolist() == [1, 2]
    assert weight._version > version


def test_one_stream_per_device(accelerator):
    stager = TorchStager(lambda device: accelerator)
    for _ in range(3):
        stager.copy_out(LocalShard((), (), torch.tensor(1.0)), stager.buffer(4)).wait()
    assert accelerator.made == 1


def test_buffers_are_pinned_only_where_a_device_is_in_use(monkeypatch):
    asked = []

    class Pinning(Accelerator):
        def pinned(self, nbytes):
            asked.append(nbytes)
            return torch.empty(nbytes, dtype=torch.uint8)

    stager = TorchStager()
    stager.release(stager.buffer(10_000))
    assert not asked
    monkeypatch.setattr("hyper_ckpt_torch.stager.accelerator_in_use", lambda: Pinning(None))
    buffer = stager.buffer(1 << 20)
    assert asked == [1 << 20]
    stager.release(buffer)
    assert stager.buffer(1 << 20) is buffer, "warm buffers are reused"


def test_no_accelerator_is_started_here():
    assert devices.accelerator_in_use() is None
    assert devices.accelerator_of(torch.device("cpu")) is None
    assert devices.current_device("cpu") == torch.device("cpu")
    assert Accelerator(torch.cuda).has_streams
