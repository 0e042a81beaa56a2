"""MindSporeStager, on the host and with a stand-in for a device: nothing of it may be reached as host memory."""

import math

import mindspore as ms
import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.numpy_platform import SingleRank
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.dtypes import BY_NAME
from hyper_ckpt.errors import TargetError
from hyper_ckpt_mindspore.devices import Device
from hyper_ckpt_mindspore.layouts import Layouts
from hyper_ckpt_mindspore.probe import Probe
from hyper_ckpt_mindspore.stager import MindSporeStager
from hyper_ckpt_mindspore.tensors import DTYPES, MindSporeTensors


class FakeDevice(Device):
    """Says that no tensor is in host memory, and counts the copies, which are those for a real device."""

    def __init__(self) -> None:
        self.copies: list[str] = []
        self.copied = 0

    def on_host(self, tensor):
        return False

    def copy_out(self, tensor, buffer):
        self.copies.append("out")
        self.copied += buffer.size
        super().copy_out(tensor, buffer)

    def copy_in(self, buffer, tensor):
        self.copies.append("in")
        super().copy_in(buffer, tensor)


def platform_on(device: Device) -> Platform:
    tensors = CompositeTensors([MindSporeTensors(Layouts((0,), 0), device), NumpyTensors()])
    return Platform("mindspore", SingleRank(), tensors, MindSporeStager(tensors, device))


@pytest.fixture(scope="module")
def probe() -> Probe:
    return Probe()


def content(dtype: str, shape: tuple[int, ...], seed: int = 0) -> bytes:
    high = 2 if dtype == "bool" else 256
    n = math.prod(shape) * BY_NAME[dtype].itemsize
    return np.random.default_rng(seed).integers(0, high, n, np.uint8).tobytes()


@pytest.mark.parametrize("device", [Device, FakeDevice])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_goes_out_and_in(probe, dtype, device):
    platform = platform_on(device())
    for shape in [(3, 5), (), (0, 2), (7,)]:
        data, new = content(dtype, shape), content(dtype, shape, 1)
        value = probe.make(dtype, shape, data)
        (shard,) = platform.tensors.local_shards(value)
        buffer = platform.stager.buffer(len(data))
        platform.stager.copy_out(shard, buffer).wait()
        assert buffer[: len(data)].tobytes() == data
        buffer[: len(new)] = np.frombuffer(new, np.uint8)
        if device is FakeDevice and dtype == "int4" and data:
            with pytest.raises(TargetError, match="Int4"):
                platform.stager.copy_in(buffer, shard)
        else:
            pointer = value.data_ptr()
            platform.stager.copy_in(buffer, shard).wait()
            assert probe.raw(value) == new
            assert value.data_ptr() == pointer
        platform.stager.release(buffer)


def test_views_on_a_device(probe):
    platform = platform_on(FakeDevice())
    for dtype in ("float32", "bfloat16", "float8_e5m2", "bool", "complex64"):
        data = content(dtype, (4, 6))
        value = probe.strided(dtype, (4, 6), data)
        (shard,) = platform.tensors.local_shards(value)
        assert platform.tensors.host_view(shard) is None
        buffer = platform.stager.buffer(len(data))
        platform.stager.copy_out(shard, buffer).wait()
        assert buffer[: len(data)].tobytes() == data
        with pytest.raises(TargetError, match="contiguous"):
            platform.tensors.writable(shard)
        with pytest.raises(TargetError, match="contiguous"):
            platform.stager.copy_in(buffer, shard)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "bool", "complex128", "int4"])
def test_fingerprints_are_the_same_wherever_a_tensor_lies(probe, dtype):
    for shape in [(4, 6), (), (0, 2), (1031, 1033)]:
        data = content(dtype, shape)
        prints = set()
        for value in (probe.make(dtype, shape, data), probe.strided(dtype, shape, data)):
            for device in (Device(), FakeDevice()):
                tensors = MindSporeTensors(Layouts((0,), 0), device)
                prints.add(tensors.fingerprint(tensors.local_shards(value)))
        assert len(prints) == 1, shape


def test_only_samples_of_a_large_tensor_leave_the_device(probe):
    device = FakeDevice()
    tensors = MindSporeTensors(Layouts((0,), 0), device)
    tensors.fingerprint(tensors.local_shards(probe.make("float32", (1024, 1024), content("float32", (1024, 1024)))))
    assert device.copied == 64 * 4096


def test_a_state_on_a_device_is_saved_and_loaded(tmp_path):
    device = FakeDevice()
    platform = platform_on(device)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    state = {"w": ms.Parameter(ms.Tensor(values), name="w"), "n": np.arange(3), "step": 3}
    hyper_ckpt.save(state, tmp_path / "c", platform=platform)
    assert device.copies.count("out") == 1
    target = {"w": ms.Parameter(ms.Tensor(values * 0), name="w"), "n": np.zeros(3, np.int64), "step": 0}
    pointer = target["w"].data_ptr()
    hyper_ckpt.load(target, tmp_path / "c", platform=platform)
    assert device.copies.count("in") == 1, "one copy of the whole tensor"
    assert np.array_equal(target["w"].asnumpy(), values)
    assert target["w"].data_ptr() == pointer
    assert (target["n"].tolist(), target["step"]) == ([0, 1, 2], 3)
