"""The suite finds plugins that are wrong in ways which only a device shows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.numpy_platform import SingleRank
from hyper_ckpt.contracts.platform import Done, Platform, Stager, Tensors
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS, PlatformBench
from hyper_ckpt_sample import device
from hyper_ckpt_sample.device import Stream
from hyper_ckpt_sample.probe import Probe
from hyper_ckpt_sample.stager import SampleStager
from hyper_ckpt_sample.tensors import SampleTensors


class HastyStream(Stream):
    """Waits for no other stream."""

    def wait_stream(self, other):
        pass


class DoesNotFollowTheCaller(SampleStager):
    def __init__(self):
        super().__init__()
        self._streams[device.device()] = HastyStream(device.device())


class CopiesInOnANewStream(SampleStager):
    """The caller's stream waits for another one than that of the copy."""

    def copy_in(self, buffer, shard):
        caller = device.current_stream(device.device())
        with device.on(Stream(device.device())):
            device.current_stream(device.device()).wait_stream(caller)
            return super().copy_in(buffer, shard)


class DoesNotWait(SampleStager):
    def copy_out(self, shard, buffer):
        super().copy_out(shard, buffer)
        return Done()


class CopiesMemoryNotElements(SampleStager):
    def copy_out(self, shard, buffer):
        tensor = shard.data.contiguous() if shard.data.size == 0 else shard.data
        flat = type(tensor)(tensor.dtype, (tensor.size,), (1,), tensor.memory, tensor.offset)
        return super().copy_out(type(shard)((0,), (tensor.size,), flat), buffer)


class WritesIntoACopy(SampleStager):
    def copy_in(self, buffer, shard):
        return super().copy_in(buffer, type(shard)(shard.offsets, shard.sizes, shard.data.contiguous()))


class ObjectsAsKeys(SampleTensors):
    def storage_key(self, shard):
        return id(shard.data)


class MemoryAsKeys(SampleTensors):
    def storage_key(self, shard):
        return (id(shard.data.memory), shard.sizes, shard.data.dtype, shard.data.offset) if shard.data.size else None


class WritesAnywhere(SampleTensors):
    def writable(self, shard):
        return None


class FirstShardOnly(SampleTensors):
    def fingerprint(self, shards):
        return super().fingerprint(shards[:1])


class WrongProbe(Probe):
    def __init__(self, stager: Callable[[], Stager], tensors: Callable[[int, int], Tensors]) -> None:
        parts = CompositeTensors([tensors(0, 1)])
        self._platform = Platform("sample", SingleRank(), parts, stager())

    def platform(self) -> Platform:
        return self._platform


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (DoesNotFollowTheCaller, "copy_out_follows_earlier_work"),
        (DoesNotFollowTheCaller, "copy_in_follows_earlier_work"),
        (CopiesInOnANewStream, "later_work_follows_copy_in"),
        (DoesNotWait, "copy_out_gives_the_bytes"),
        (DoesNotWait, "waiting_in_another_thread"),
        (CopiesMemoryNotElements, "copy_out_of_strided_tensors"),
        (WritesIntoACopy, "copy_in_to_strided_tensors"),
        (MemoryAsKeys, "storage_keys_of_other_elements_differ"),
        (WritesAnywhere, "overlapping_tensors_are_no_targets"),
        (FirstShardOnly, "fingerprints_look_at_every_shard"),
        (ObjectsAsKeys, "storage_keys_of_tied_tensors_are_equal"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_wrong_plugin_fails(tmp_path: Path, wrong: type, check: str) -> None:
    made = (wrong, SampleTensors) if issubclass(wrong, Stager) else (SampleStager, wrong)
    (chosen,) = [each for each in PLATFORM_CHECKS if each.name == check]
    with PlatformBench(WrongProbe(SampleStager, SampleTensors), tmp_path / "right") as bench:
        bench.run(chosen)
    with PlatformBench(WrongProbe(*made), tmp_path / "wrong") as bench, pytest.raises(AssertionError, match="promised"):
        bench.run(chosen)
