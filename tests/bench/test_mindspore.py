"""MindSpore on one rank: saves and loads beside the floor of the same memory, and beside MindSpore's own files.

Run with `make bench`; prints tables, asserts nothing about time. The floor is a bare loop over the memory of the very
parameters. HYPER_CKPT_BENCH_DIR chooses the disk, HYPER_CKPT_MINDSPORE_MB the size.

MindSpore's `load_checkpoint` of a safetensors file maps it, and `load_param_into_net` lets parameters point at what was
loaded: together they read nothing. Lines that end in "copied" fill the memory that parameters had, as we do.
"""

import os
import shutil
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt

from ._places import DISK, fresh
from .test_speed import REPETITIONS, bare_read, bare_write, interleaved, timed

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

MB = int(os.environ.get("HYPER_CKPT_MINDSPORE_MB", "500"))
PARAMETERS = 64
FORMATS = ("safetensors", "ckpt")


@pytest.fixture(scope="module")
def ms() -> Any:
    """Imported late: it takes seconds, and nobody who only collects should wait for it."""
    os.environ.setdefault("GLOG_v", "4")  # read once, at the import: nothing but fatal errors
    return pytest.importorskip("mindspore")


@pytest.fixture
def place() -> Iterator[Path]:
    yield from fresh(DISK / "bench-mindspore")


def make_net(ms: Any, fill: Callable[[int, int], np.ndarray]) -> Any:
    """A cell with parameters made of numpy arrays, whose memory has been written."""
    net, count = ms.nn.Cell(), MB * 1_000_000 // PARAMETERS // 4
    for i in range(PARAMETERS):
        name = f"p{i:02}"
        net.insert_param_to_cell(name, ms.Parameter(ms.Tensor.from_numpy(fill(i, count)), name=name))
    return net


def random(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).random(count, dtype=np.float32)


def zeros(_: int, count: int) -> np.ndarray:
    return np.zeros(count, np.float32)


@pytest.fixture(scope="module")
def net(ms: Any) -> Any:
    return make_net(ms, random)


def memory(net: Any) -> dict[str, np.ndarray]:
    """The parameters' own memory: a Parameter copies the array that it is made of, but shows its memory as one."""
    arrays = {name: parameter.asnumpy() for name, parameter in net.parameters_dict().items()}
    assert all(array.ctypes.data == net.parameters_dict()[name].data_ptr() for name, array in arrays.items())
    return arrays


def with_floors(floor: Callable[[int], float], lines: dict[str, Callable[[], float]]) -> dict[str, Callable[[], float]]:
    """The floor with one thread and with two, before the lines and again after them."""
    first, again = (
        {f"{name}, {n} thread{'s' * (n > 1)}": lambda n=n: floor(n) for n in (1, 2)} for name in ("floor", "again")
    )
    return {**first, **lines, **again}


def show(title: str, rows: dict[str, list[float]], pick: Callable[[list[float]], float]) -> None:
    best = {name: pick(seconds) for name, seconds in rows.items()}
    floor = min(best["floor, 1 thread"], best["floor, 2 threads"])
    again = min(best["again, 1 thread"], best["again, 2 threads"])
    print(f"\n{title}: {MB} MB in {PARAMETERS} parameters, {REPETITIONS} repetitions, {pick.__name__}")
    for name, seconds in best.items():
        print(f"  {name:32} {seconds:8.4f} s  {seconds / floor:6.2f} x the floor")
    print(f"  floor against itself: {again / floor:.3f}")


def test_save(place: Path, ms: Any, net: Any) -> None:
    numbers = iter(range(1_000_000))
    state, arrays = net.parameters_dict(), memory(net)

    def writing(write: Callable[[Path], object]) -> float:
        path = place / f"save-{next(numbers)}"
        os.sync()
        seconds = timed(lambda: write(path) and None)
        for each in place.glob(f"{path.name}*"):  # MindSpore appends the format to the name
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        return seconds

    lines = {
        "hyper-ckpt": lambda: writing(lambda path: hyper_ckpt.save(state, path, durable=False)),
        **{
            f"mindspore {ms.__version__}, {format}": lambda format=format: writing(
                lambda path: ms.save_checkpoint(net, str(path), format=format)
            )
            for format in FORMATS
        },
    }
    actions = with_floors(lambda n: writing(lambda path: bare_write(path, arrays, n, False)), lines)
    show("save, not durable", interleaved(actions), min)
    hyper_ckpt.save(state, place / "checked", durable=False)
    saved = hyper_ckpt.read(place / "checked")
    assert all(np.array_equal(saved[name], array) for name, array in arrays.items())


def test_load(place: Path, ms: Any, net: Any) -> None:
    hyper_ckpt.save(net.parameters_dict(), place / "ours", durable=False)
    for format in FORMATS:
        ms.save_checkpoint(net, str(place / "theirs"), format=format)
    bare_write(place / "bare", memory(net), 1, False)
    target = make_net(ms, zeros)
    swapped = make_net(ms, zeros)  # of its own, since its parameters leave their memory
    arrays, copied = memory(target), target.parameters_dict()

    def theirs(format: str) -> Any:
        return ms.load_checkpoint(str(place / f"theirs.{format}"), format=format)

    def copy(format: str) -> None:
        for name, parameter in theirs(format).items():
            copied[name].copy_(parameter)
        ms.runtime.synchronize()  # the copies are only queued

    lines: dict[str, Callable[[], object]] = {
        "hyper-ckpt, unverified": lambda: hyper_ckpt.load(copied, place / "ours", verify="off"),
        "hyper-ckpt, every block verified": lambda: hyper_ckpt.load(copied, place / "ours"),
        **{f"mindspore, {f}, into net": lambda f=f: ms.load_param_into_net(swapped, theirs(f)) for f in FORMATS},
        **{f"mindspore, {f}, copied": lambda f=f: copy(f) for f in FORMATS},
    }
    actions = with_floors(
        lambda n: timed(lambda: bare_read(place / "bare", arrays, n)),
        {name: lambda line=line: timed(lambda: line() and None) for name, line in lines.items()},
    )
    show("load into parameters that are there", interleaved(actions), statistics.median)

    for name in (
        "hyper-ckpt, unverified",
        "hyper-ckpt, every block verified",
        *(f"mindspore, {f}, copied" for f in FORMATS),
    ):
        for array in arrays.values():
            array[...] = -1
        lines[name]()
        assert all(np.array_equal(copied[key].asnumpy(), array) for key, array in memory(net).items()), name
    assert memory(target).keys() == arrays.keys()
    assert all(array.ctypes.data == memory(target)[key].ctypes.data for key, array in arrays.items())
