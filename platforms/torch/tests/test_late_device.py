"""The torch stager on a device that runs everything as late as the rules allow.

Each `test_a_wrong_stager_is_found` takes one rule away and must see wrong bytes: so these tests can fail.
"""

import gc
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hyper_ckpt_sample import device as chips
from hyper_ckpt_sample.device import Device
from hyper_ckpt_torch import devices
from hyper_ckpt_torch.devices import Accelerator
from hyper_ckpt_torch.stager import TorchStager

spec = importlib.util.spec_from_file_location("late_torch", Path(__file__).with_name("late_torch.py"))
late = importlib.util.module_from_spec(spec)
spec.loader.exec_module(late)


@pytest.fixture
def chip():
    chip = Device(0)
    with late.LateTorch(chip):
        yield chip


# Each plays one scene on a chip and says whether all bytes were right.


def earlier_work_is_copied_out(chip: Device, stager: TorchStager) -> bool:
    tensor = late.on_device(chip, late.floats(1))
    tensor.fill_(2)
    buffer, pending = late.start_out(stager, tensor)
    assert late.now(tensor) == [1], "the device is late"
    pending.wait()
    return bool((buffer[:256].view(np.float32) == 2).all())


def earlier_readers_see_the_old_bytes(chip: Device, stager: TorchStager) -> bool:
    tensor, snapshot = late.on_device(chip, late.floats(1)), late.on_device(chip, late.floats(0))
    snapshot.copy_(tensor)
    late.start_in(stager, tensor, late.floats(2)).wait()
    chips.synchronize(chip)
    return (late.now(snapshot), late.now(tensor)) == ([1], [2])


def later_work_sees_the_new_bytes(chip: Device, stager: TorchStager) -> bool:
    tensor, result = late.on_device(chip, late.floats(1)), late.on_device(chip, late.floats(0))
    late.start_in(stager, tensor, late.floats(2))
    result.copy_(tensor * 3)
    chips.current_stream(chip).synchronize()
    return late.now(result) == [6]


def memory_is_freed_after_the_copy(chip: Device, stager: TorchStager) -> bool:
    """The last reference goes while the copy is still to run, and the caller goes on with new tensors."""
    tensor = late.on_device(chip, late.floats(1))
    buffer, _ = late.start_out(stager, tensor)
    del _, tensor
    gc.collect()
    late.on_device(chip, late.floats(9)).fill_(9)
    chips.current_stream(chip).synchronize()
    chips.synchronize(chip)
    return bool((buffer[:256].view(np.float32) == 1).all())


def many_copies_through_few_buffers(chip: Device, stager: TorchStager) -> bool:
    seen = []
    for number in range(12):
        tensor = late.on_device(chip, late.floats(number))
        tensor.add_(0.5)
        buffer, pending = late.start_out(stager, tensor)
        pending.wait()
        seen.append(float(buffer[:256].view(np.float32).max()))
        stager.release(buffer)
    return seen == [number + 0.5 for number in range(12)]


SCENES = [
    earlier_work_is_copied_out,
    earlier_readers_see_the_old_bytes,
    later_work_sees_the_new_bytes,
    memory_is_freed_after_the_copy,
    many_copies_through_few_buffers,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_stager_is_right(chip, scene):
    assert scene(chip, late.stager_of(late.LateAccelerator(chip)))


@pytest.mark.parametrize(
    ("wrong", "scene"),
    [
        (late.UnorderedCopies, earlier_work_is_copied_out),
        (late.UnorderedCopies, earlier_readers_see_the_old_bytes),
        (late.UnorderedCopies, many_copies_through_few_buffers),
        (late.UnorderedCaller, later_work_sees_the_new_bytes),
        (late.Forgetful, memory_is_freed_after_the_copy),
        (late.EarlyEvents, earlier_work_is_copied_out),
        (late.EarlyEvents, many_copies_through_few_buffers),
    ],
    ids=lambda each: each.__name__,
)
def test_a_wrong_stager_is_found(chip, wrong, scene):
    assert not scene(chip, late.stager_of(wrong(chip)))


def test_a_buffer_released_too_early_is_found(chip):
    stager = late.stager_of(late.LateAccelerator(chip))
    one, pending = late.start_out(stager, late.on_device(chip, late.floats(1)))
    stager.release(one)
    other = stager.buffer(256)
    assert other is one, "warm buffers are reused at once"
    other[:] = 7
    pending.wait()
    assert not (other == 7).all()


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float8_e5m2", "float64", "complex64", "complex128"])
def test_views_of_any_dtype_both_ways(chip, dtype):
    stager = late.stager_of(late.LateAccelerator(chip))
    data = np.arange(24 * 16, dtype=np.uint8)[: 24 * getattr(torch, dtype).itemsize] % 2
    tensor = late.on_device(chip, data).view(getattr(torch, dtype)).view(4, 6)[:, ::2].t()
    with late.at_once():
        expected = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    buffer, pending = late.start_out(stager, tensor)
    pending.wait()
    assert buffer[: len(expected)].tobytes() == expected
    new = np.arange(len(expected), dtype=np.uint8) % 2
    late.start_in(stager, tensor, new).wait()
    with late.at_once():
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == new.tobytes()


def test_lazy_conjugates_and_negatives_are_resolved_behind_the_caller(chip):
    stager = late.stager_of(late.LateAccelerator(chip))
    tensor = late.on_device(chip, np.full(8, 1 + 2j, np.complex64))
    tensor.mul_(2)
    for view, value in [(tensor.conj(), 2 - 4j), (tensor.conj().imag, -4)]:
        buffer, pending = late.start_out(stager, view)
        pending.wait()
        got = buffer[: view.nbytes].view(np.complex64 if view.is_complex() else np.float32)
        assert (got == value).all()


def test_a_load_is_seen_by_autograd(chip):
    stager = late.stager_of(late.LateAccelerator(chip))
    weight = torch.nn.Parameter(late.on_device(chip, late.floats(1)))
    version = weight._version
    late.start_in(stager, weight.detach(), late.floats(2)).wait()
    assert weight._version > version
    assert late.now(weight) == [2]


def test_one_stream_per_device(chip):
    accelerator = late.LateAccelerator(chip)
    stager = late.stager_of(accelerator)
    for _ in range(3):
        late.start_out(stager, late.on_device(chip, late.floats(1)))[1].wait()
    assert len(accelerator.made) == 1


def in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]


def test_waits_in_other_threads(chip):
    stager = late.stager_of(late.LateAccelerator(chip))
    tensors = [late.on_device(chip, late.floats(number)) for number in range(16)]
    for tensor in tensors:
        tensor.add_(0.25)
    copies = [late.start_out(stager, tensor) for tensor in tensors]

    def wait(number: int) -> None:
        for each in range(number, 16, 4):
            buffer, pending = copies[each]
            pending.wait()
            assert (buffer[:256].view(np.float32) == each + 0.25).all()
            stager.release(buffer)

    in_threads(4, wait)


def test_each_thread_follows_its_own_work(chip):
    """Several threads copy at once through one stager, each behind its own stream."""
    stager = late.stager_of(late.LateAccelerator(chip))

    def work(number: int) -> None:
        with late.LateTorch(chip):
            for turn in range(20):
                tensor = late.on_device(chip, late.floats(number))
                tensor.add_(turn)
                buffer, pending = late.start_out(stager, tensor)
                pending.wait()
                assert (buffer[:256].view(np.float32) == number + turn).all()
                stager.release(buffer)
                late.start_in(stager, tensor, late.floats(7)).wait()
                assert late.now(tensor) == [7]

    in_threads(4, work)


def test_a_copy_started_in_another_thread_is_found(chip):
    """The engine may copy in the caller's thread only: another one has another stream."""
    stager = late.stager_of(late.LateAccelerator(chip))
    tensor = late.on_device(chip, late.floats(1))
    tensor.fill_(2)
    seen: list[float] = []

    def work(number: int) -> None:
        with late.LateTorch(chip):
            buffer, pending = late.start_out(stager, tensor)
            pending.wait()
            seen.append(float(buffer[:256].view(np.float32)[0]))

    in_threads(1, work)
    assert seen == [1]


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
