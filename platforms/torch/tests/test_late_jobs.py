"""Whole saves and loads with torch tensors on a device that runs everything as late as the rules allow."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import hyper_ckpt
from hyper_ckpt import PerRank, ShardedTensor
from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.numpy_platform import SingleRank
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import Platform, Ranks, sampled_fingerprint
from hyper_ckpt.testing.world import run_world
from hyper_ckpt_sample import device as chips
from hyper_ckpt_sample.device import Device
from hyper_ckpt_torch.stager import TorchStager
from hyper_ckpt_torch.tensors import TorchTensors, check_target

spec = importlib.util.spec_from_file_location("late_torch", Path(__file__).with_name("late_torch.py"))
late = importlib.util.module_from_spec(spec)
spec.loader.exec_module(late)


@pytest.fixture
def chip():
    chip = Device(0)
    with late.LateTorch(chip):
        yield chip


class LateTensors(TorchTensors):
    """torch's tensors, as if none of them lay in host memory."""

    def __init__(self, ranks: Ranks, chip: Device) -> None:
        super().__init__(range(ranks.world_size))
        self._chip = chip

    def host_view(self, shard):
        return None

    def writable(self, shard):
        check_target(shard.data)

    def fingerprint(self, shards):
        chips.current_stream(self._chip).synchronize()  # as `tensor.cpu()` does
        with late.at_once():
            return sampled_fingerprint([shard.data.contiguous().view(torch.uint8).numpy() for shard in shards])


ROWS, COLUMNS = 24, 40
WEIGHT = np.random.default_rng(3).random((ROWS, COLUMNS), np.float32)


def job(act: Callable[[Platform, Device], object], wrong: type = late.LateAccelerator, size: int = 2):
    """Calls `act(platform, chip)` on ranks that are threads, each with a chip of its own."""

    def run(platform: Platform) -> object:
        chip = platform.tensors._parts[0]._chip
        with late.LateTorch(chip):
            return act(platform, chip)

    def make(ranks: Ranks) -> Platform:
        chip = Device(ranks.rank)
        tensors = CompositeTensors([LateTensors(ranks, chip), NumpyTensors()])
        return Platform("late torch", ranks, tensors, late.stager_of(wrong(chip)))

    return run_world(size, run, platform=make)


def rows_of(rank: int, size: int) -> slice:
    return slice(rank * ROWS // size, (rank + 1) * ROWS // size)


def zeros(chip: Device, rank: int, size: int) -> dict:
    part = WEIGHT[rows_of(rank, size)]
    return {
        "w": ShardedTensor([(late.on_device(chip, part * 0), (rank * ROWS // size, 0))], (ROWS, COLUMNS)),
        "same": late.on_device(chip, WEIGHT.T * 0),
        "large": [late.on_device(chip, late.floats(0, 1 << 19)) for _ in range(4)],  # 2 MiB each
        "mine": PerRank({"t": late.on_device(chip, late.floats(0)), "step": 0}),
    }


def tensors_in(state: dict) -> list[torch.Tensor]:
    return [state["w"].shards[0][0], state["same"], *state["large"]]


def written(chip: Device, rank: int, size: int) -> dict:
    """A state whose values are queued on the caller's stream, and not there yet."""
    state = zeros(chip, rank, size)
    with late.at_once():
        values = [torch.from_numpy(each.copy()) for each in (WEIGHT[rows_of(rank, size)], WEIGHT.T)]
    for tensor, value in zip(tensors_in(state), values, strict=False):
        tensor.copy_(value)
    for number, tensor in enumerate(state["large"]):
        tensor.fill_(number + 1)
    state["mine"].value["t"].fill_(rank + 1)
    return state


def save_late(path: str, size: int, wrong: type = late.LateAccelerator) -> None:
    def act(platform: Platform, chip: Device) -> None:
        state = written(chip, platform.ranks.rank, size)
        hyper_ckpt.save(state, path, platform=platform, overwrite=True, max_host_bytes=5 << 20, timeout=20)
        for tensor in tensors_in(state):  # what comes next is not saved
            tensor.fill_(-1)
        chips.synchronize(chip)

    job(act, wrong, size)


def save_in_the_background(path: str, size: int) -> None:
    """An async_save whose state is changed as soon as that is allowed."""

    def act(platform: Platform, chip: Device) -> None:
        state = written(chip, platform.ranks.rank, size)
        handle = hyper_ckpt.async_save(state, path, platform=platform, overwrite=True, timeout=20)
        handle.wait_staged(20)
        for tensor in tensors_in(state):
            tensor.fill_(-1)
        chips.current_stream(chip).synchronize()
        handle.result(20)

    job(act, size=size)


def saved_right(path: str) -> bool:
    state = hyper_ckpt.read(path)
    large = all((array == number + 1).all() for number, array in enumerate(state["large"]))
    mine = bool((state["mine"].value["t"] == 1).all())
    return bool((state["w"] == WEIGHT).all() and (state["same"] == WEIGHT.T).all() and large and mine)


def loaded_right(path: str, size: int, wrong: type = late.LateAccelerator, **options: object) -> bool:
    """Whether work queued before a load saw the old values, and work queued after it the new ones."""

    def act(platform: Platform, chip: Device) -> bool:
        rank = platform.ranks.rank
        state = zeros(chip, rank, size)
        before = [late.on_device(chip, np.ones(t.shape, np.float32)) for t in tensors_in(state)]
        after = [late.on_device(chip, np.ones(t.shape, np.float32)) for t in tensors_in(state)]
        for tensor, snapshot in zip(tensors_in(state), before, strict=True):
            snapshot.copy_(tensor)
        hyper_ckpt.load(state, path, platform=platform, timeout=20, **options)
        for tensor, result in zip(tensors_in(state), after, strict=True):
            result.copy_(tensor)
        chips.current_stream(chip).synchronize()
        wanted = [WEIGHT[rows_of(rank, size)], WEIGHT.T, *(late.floats(n + 1, 1 << 19) for n in range(4))]
        with late.at_once():
            right = all((result.numpy() == value).all() for result, value in zip(after, wanted, strict=True))
            return right and all(late.now(snapshot) == [0] for snapshot in before)

    return all(job(act, wrong, size))


@pytest.mark.parametrize("size", [1, 2])
def test_whole_saves_and_loads(tmp_path: Path, size: int):
    path = str(tmp_path / "checkpoint")
    save_late(path, size)
    assert saved_right(path)
    assert loaded_right(path, size)
    assert loaded_right(path, size, share_reads=False)


def test_wrong_stagers_are_found_in_whole_saves_and_loads(tmp_path: Path):
    path = str(tmp_path / "checkpoint")
    for wrong in (late.UnorderedCopies, late.EarlyEvents):
        save_late(path, 1, wrong)
        assert not saved_right(path), wrong
    save_late(path, 1)
    assert not loaded_right(path, 1, late.UnorderedCopies)
    assert not loaded_right(path, 1, late.EarlyEvents)


@pytest.mark.parametrize("size", [1, 2])
def test_saves_in_the_background(tmp_path: Path, size: int):
    path = str(tmp_path / "checkpoint")
    save_in_the_background(path, size)
    assert saved_right(path)


def test_a_failed_save_leaves_no_copy_behind(chip, tmp_path: Path):
    """Buffers go back to the pool only when nothing will write to them any more, also after an error."""

    class Failing(TorchStager):
        copies = 0

        def copy_out(self, shard, buffer):
            self.copies += 1
            if self.copies == 2:
                raise RuntimeError("out of memory")
            return super().copy_out(shard, buffer)

    stager = Failing(lambda device: late.LateAccelerator(chip))
    ranks = SingleRank()
    platform = Platform("late torch", ranks, CompositeTensors([LateTensors(ranks, chip)]), stager)
    state = {"a": late.on_device(chip, late.floats(1)), "b": late.on_device(chip, late.floats(1))}
    with pytest.raises(RuntimeError, match="out of memory"):
        hyper_ckpt.save(state, str(tmp_path / "checkpoint"), platform=platform)
    buffers = [stager.buffer(256) for _ in range(2)]
    for buffer in buffers:
        buffer[:] = 7
    chips.synchronize(chip)
    assert all((buffer == 7).all() for buffer in buffers)
