"""Whole jobs on the sample accelerator: processes save and load, on other numbers of ranks and by other shardings."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import PerRank
from hyper_ckpt.errors import (
    MissingKeyError,
    RankFailedError,
    StateMismatchError,
    TargetError,
    UnsupportedDtypeError,
    UnsupportedLayoutError,
)
from hyper_ckpt.testing.pool import PoolError
from hyper_ckpt_sample import device, framework
from hyper_ckpt_sample.framework import Sharded, Sharding, Tensor

Spec = tuple[tuple[tuple[str, int], ...], tuple[object, ...]]
SHAPES = {"w": ("bf16", (7, 5)), "e": ("f32", (33, 10)), "m": ("f8e4m3", (3, 2, 9)), "z": ("c64", (2, 3))}


def whole(name: str) -> bytes:
    dtype, shape = SHAPES[name]
    nbytes = int(np.prod(shape)) * framework.DTYPES[dtype]
    return np.random.default_rng(sum(name.encode())).integers(0, 256, nbytes, np.uint8).tobytes()


def sharding(axes: tuple[tuple[str, int], ...], spec: tuple[object, ...], ndim: int) -> Sharding:
    return Sharding(axes, (*spec, *(None,) * ndim)[:ndim])


def state_of(rank: int, axes: tuple[tuple[str, int], ...], spec: tuple[object, ...], *, filled: bool) -> dict:
    out: dict = {"step": 7 if filled else 0, "mine": PerRank({"seed": rank if filled else -1})}
    for name, (dtype, shape) in SHAPES.items():
        data = whole(name) if filled else bytes(len(whole(name)))
        out[name] = framework.shard(dtype, shape, data, sharding(axes, spec, len(shape)), rank)
    data = whole("w") if filled else bytes(len(whole("w")))
    out["bias"] = framework.from_host("bf16", (7, 5), data)
    out["host"] = np.arange(4) if filled else np.zeros(4, np.int64)
    return out


def check(state: dict, rank: int) -> None:
    for name, (dtype, shape) in SHAPES.items():
        value: Sharded = state[name]
        box = value.sharding.box(shape, rank)
        array = np.frombuffer(whole(name), f"V{framework.DTYPES[dtype]}").reshape(shape)
        if box is not None:
            part = array[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
            assert value.local.to_host() == part.tobytes(), name
    assert state["bias"].to_host() == whole("w")
    assert (state["step"], state["host"].tolist()) == (7, [0, 1, 2, 3])


def save(rank: int, world_size: int, path: str, axes, spec) -> int:
    state = state_of(rank, axes, spec, filled=True)
    hyper_ckpt.save(state, path)
    # What the training does next is not in the checkpoint.
    for value in state.values():
        if isinstance(value, Tensor | Sharded):
            local = value.local if isinstance(value, Sharded) else value
            local.set_bytes(b"\xee" * local.nbytes)
    return 0


def load(rank: int, world_size: int, path: str, axes, spec, saved_ranks: int = 4) -> object:
    state = state_of(rank, axes, spec, filled=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = hyper_ckpt.load(state, path)
    assert len(caught) == (rank == 0 and world_size != saved_ranks) + (rank >= saved_ranks)
    check(state, rank)
    assert state["mine"].value == {"seed": rank if rank < saved_ranks else -1}
    return report.loaded


FSDP = ((("data", 4),), ("data",))
HYBRID = ((("data", 2), ("model", 2)), ("model", "data"))
BOTH = ((("data", 2), ("model", 2)), (("data", "model"),))
SWAPPED = ((("data", 2), ("model", 2)), (("model", "data"), None))


@pytest.mark.parametrize("saved", [FSDP, HYBRID, BOTH, SWAPPED], ids=["fsdp", "hybrid", "both", "swapped"])
def test_saved_by_four_loaded_by_others(world, tmp_path: Path, saved: Spec):
    path = str(tmp_path / "checkpoint")
    assert world(save, path, *saved) == [0] * 4
    assert len(world(load, path, (("x", 2),), (None, "x"), world_size=2)[1]) == 5 + 1
    world(load, path, (("x", 3),), ("x",), world_size=3)
    world(load, path, *HYBRID)
    state = hyper_ckpt.read(path)
    assert all(state[name].tobytes() == whole(name) for name in SHAPES)
    assert state["bias"].tobytes() == whole("w")
    assert str(state["w"].dtype) == "bfloat16"
    assert hyper_ckpt.verify(path).ok


def save_on_some(rank: int, world_size: int, path: str) -> None:
    """Two halves of the ranks hold one tensor each, as pipeline stages do."""
    half = Sharding((("x", 2),), ("x", None), first_rank=rank // 2 * 2)
    data = framework.shard("bf16", (7, 5), whole("w"), half, rank)
    hyper_ckpt.save({f"stage{rank // 2}": data}, path)


def test_tensors_on_some_of_the_ranks(world, tmp_path: Path):
    world(save_on_some, str(tmp_path / "checkpoint"))
    state = hyper_ckpt.read(str(tmp_path / "checkpoint"))
    assert {name: array.tobytes() for name, array in state.items()} == {"stage0": whole("w"), "stage1": whole("w")}


def one_rank_fails(rank: int, world_size: int, path: str) -> str:
    dtype = "f4x2" if rank == 1 else "u8"
    with pytest.raises((UnsupportedDtypeError, RankFailedError), match="f4x2") as caught:
        hyper_ckpt.save({"w": framework.empty(dtype, (3,))}, path)
    save(rank, world_size, path, (("x", world_size),), ("x",))
    return str(caught.value)


def test_a_failure_of_one_rank_is_everybodys_and_the_next_save_works(world, tmp_path: Path):
    assert all("rank 1" in text or "'w'" in text for text in world(one_rank_fails, str(tmp_path / "c"), world_size=2))


def one_rank_dies(rank: int, world_size: int, path: str) -> None:
    state = state_of(rank, (("x", world_size),), ("x",), filled=True)
    hyper_ckpt.save(state, path)
    if rank == 1:
        os._exit(9)
    with pytest.raises(hyper_ckpt.CheckpointError):
        hyper_ckpt.save(state, path + "2", timeout=2)


def test_a_rank_that_dies_between_saves(world, tmp_path: Path):
    with pytest.raises(PoolError) as caught:
        world(one_rank_dies, str(tmp_path / "c"), world_size=3)
    assert list(caught.value.problems) == [1]
    assert hyper_ckpt.verify(str(tmp_path / "c")).ok


def test_one_process_with_work_under_way(tmp_path: Path):
    path = str(tmp_path / "checkpoint")
    big = framework.empty("u8", (3 << 20,))
    data = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8).tobytes()
    big.set_bytes(data)  # has not run when the save begins
    view = framework.empty("i16", (6, 4)).transpose()
    view.set_bytes(bytes(range(48)))
    hyper_ckpt.save({"big": big, "view": view, "tied": view.alias()}, path)
    big.set_bytes(bytes(3 << 20))
    target = framework.empty("u8", (3 << 20,))
    target.set_bytes(bytes(3 << 20))
    snapshot = framework.empty("u8", (3 << 20,))
    snapshot.copy_(target)  # still reads the target when the load begins
    hyper_ckpt.load({"big": target}, path, strict=False)
    after = framework.empty("u8", (3 << 20,))
    after.copy_(target)
    device.current_stream(device.device()).synchronize()
    assert (snapshot.to_host(), after.to_host()) == (bytes(3 << 20), data)
    assert hyper_ckpt.read(path, keys=["view"])["view"].tobytes() == bytes(range(48))
    own = hyper_ckpt.read(path, platform="sample")
    assert isinstance(own["big"], Tensor)
    assert own["big"].to_host() == data


def test_described_targets_get_memory(tmp_path: Path):
    path = str(tmp_path / "checkpoint")
    hyper_ckpt.save({"w": framework.from_host("f32", (2, 3), bytes(range(24)))}, path)
    state = {"w": framework.described("f32", (2, 3))}
    hyper_ckpt.load(state, path)
    assert state["w"].to_host() == bytes(range(24))


def test_what_does_not_fit_is_refused(tmp_path: Path):
    path = str(tmp_path / "checkpoint")
    good = framework.from_host("f32", (2, 3), bytes(range(24)))
    hyper_ckpt.save({"w": good}, path)
    with pytest.raises(TargetError, match="share memory"):
        hyper_ckpt.load({"w": framework.from_host("f32", (3,), bytes(12)).broadcast(2)}, path)
    with pytest.raises(StateMismatchError):
        hyper_ckpt.load({"w": framework.empty("f32", (3, 2))}, path)
    with pytest.raises(MissingKeyError):
        hyper_ckpt.load({"v": good}, path)
    for bad in [Sharding((("x", 1),), ("x",)), Sharding((("x", 1),), ("y", None)), Sharding((("x", 2),), ("x", None))]:
        with pytest.raises(UnsupportedLayoutError):
            hyper_ckpt.save({"w": Sharded(good, (2, 3), bad)}, path, overwrite=True)
    one = Sharding((("x", 1),), ("x", None))
    with pytest.raises(UnsupportedLayoutError, match="part of shape"):
        hyper_ckpt.save({"w": Sharded(good, (4, 3), one)}, path, overwrite=True)


def test_the_entry_module_imports_no_framework():
    script = (
        "import sys; from hyper_ckpt_sample import plugin; (spec,) = plugin.hyper_ckpt_platforms(); "
        "assert spec.active() == 0; assert 'hyper_ckpt_sample.framework' not in sys.modules; print(spec.name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "sample\n"


@pytest.mark.parametrize("waits", [True, False])
def test_an_async_save_holds_what_was_there_when_it_was_staged(tmp_path: Path, waits: bool) -> None:
    """Copies run late: a change that does not wait for them would be in the file."""
    old, new = np.arange(5000, dtype="f4"), np.zeros(5000, "f4")
    for number in range(3):
        value = framework.from_host("f32", (5000,), old.tobytes())
        handle = hyper_ckpt.async_save({"w": value}, tmp_path / str(number), platform="sample")
        if waits:
            handle.wait_staged(30)
            value.set_bytes(new.tobytes())
            assert value.to_host() == new.tobytes()
        handle.result(30)
        assert np.array_equal(hyper_ckpt.read(tmp_path / str(number))["w"], old)
