"""Save and load against the disk's own floor. Run with `make bench`; prints tables, asserts nothing about time.

Only ratios of one run count: machines are shared. Floor, library and floor again take turns; the second floor
against the first says how far the line can be trusted (3 % on a disk, 5 % on tmpfs).
HYPER_CKPT_BENCH_DIR chooses the disk, HYPER_CKPT_BENCH_MIB the size.
"""

import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.engine.digest import block_digest
from hyper_ckpt.receipt import BLOCK_BYTES
from hyper_ckpt.storage.syscalls import preallocate

from ._places import DISK, fresh

pytestmark = pytest.mark.bench

MIB = int(os.environ.get("HYPER_CKPT_BENCH_MIB", "512"))
TENSORS, WARM_UPS, REPETITIONS, BLOCK = 16, 2, 9, 8 << 20


def places() -> list[Path]:
    disk = DISK / "bench"
    return [disk, Path("/dev/shm/hyper-ckpt-bench")] if os.path.isdir("/dev/shm") else [disk]


@pytest.fixture(params=places(), ids=lambda p: "tmpfs" if str(p).startswith("/dev/shm") else "disk")
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    yield from fresh(request.param)


@pytest.fixture(scope="module")
def state() -> dict[str, np.ndarray]:
    # Written once, so that no page is touched for the first time inside a clock.
    count = (MIB << 20) // TENSORS // 4
    return {f"t{i}": np.random.default_rng(i).random(count, dtype=np.float32) for i in range(TENSORS)}


def timed(action: Callable[[], None]) -> float:
    gc.collect()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def segments(state: dict[str, np.ndarray]) -> list[tuple[int, memoryview]]:
    """(offset in one file, block) of all bytes."""
    out, at = [], 0
    for array in state.values():
        data = memoryview(array).cast("B")
        out += [(at + i, data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]
        at += len(data)
    return out


def bare_write(path: Path, state: dict[str, np.ndarray], threads: int, durable: bool) -> None:
    blocks = segments(state)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
    preallocate(fd, sum(len(b) for _, b in blocks))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda block: os.pwrite(fd, block[1], block[0]), blocks))
    if durable:
        os.fsync(fd)
    os.close(fd)


def bare_read(path: Path, state: dict[str, np.ndarray], threads: int, base: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda block: os.preadv(fd, [block[1]], base + block[0]), segments(state)))
    os.close(fd)


def bare_verified_read(path: Path, state: dict[str, np.ndarray], base: int) -> None:
    """What a verified load does to the bytes and nothing else, on two threads: digests each block while it is in the
    cache."""
    fd = os.open(path, os.O_RDONLY)

    def read(block: tuple[int, memoryview]) -> None:
        at, data = block
        for i in range(0, len(data), BLOCK_BYTES):
            part = data[i : i + BLOCK_BYTES]
            os.preadv(fd, [part], base + at + i)
            block_digest(part)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, segments(state)))
    os.close(fd)


def interleaved(actions: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {name: [] for name in actions}
    for repetition in range(WARM_UPS + REPETITIONS):
        for name, action in actions.items():
            seconds = action()
            if repetition >= WARM_UPS:
                rows[name].append(seconds)
    return rows


def report(title: str, rows: dict[str, list[float]], pick: Callable[[list[float]], float]) -> None:
    best = {name: pick(seconds) for name, seconds in rows.items()}
    floor = min(best["floor, 1 thread"], best["floor, 2 threads"])
    again = min(best["again, 1 thread"], best["again, 2 threads"])
    print(f"\n{title}: {MIB} MiB, {REPETITIONS} repetitions, {pick.__name__}")
    for name, seconds in best.items():
        print(f"  {name:18} {seconds:7.3f} s {MIB / 1024 / seconds:6.2f} GiB/s  {floor / seconds:5.2f} of the floor")
    print(f"  floor against itself: {again / floor:.3f}")


@pytest.mark.parametrize("durable", [False, True], ids=["cached", "durable"])
def test_save(place: Path, state: dict[str, np.ndarray], durable: bool) -> None:
    numbers = iter(range(1_000_000))

    def writing(write: Callable[[Path], None]) -> Callable[[], float]:
        def run() -> float:
            path = place / str(next(numbers))
            os.sync()
            seconds = timed(lambda: write(path))
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            return seconds

        return run

    actions = {
        f"{name}, {threads} thread{'s' * (threads > 1)}": writing(
            lambda path, threads=threads: bare_write(path, state, threads, durable)
        )
        for name in ("floor", "again")
        for threads in (1, 2)
    }
    ours = writing(lambda path: hyper_ckpt.save(state, path, durable=durable) and None)
    order = {**dict(list(actions.items())[:2]), "hyper-ckpt": ours, **dict(list(actions.items())[2:])}
    report(f"save, {'durable' if durable else 'cached'}, {place.name}", interleaved(order), min)


@pytest.mark.parametrize("verify", ["off", "during"])
def test_load(place: Path, state: dict[str, np.ndarray], verify: str) -> None:
    hyper_ckpt.save(state, place / "checkpoint", durable=False)
    target = {name: np.zeros_like(state[name]) for name in sorted(state)}  # as they lie in the file
    # The floor reads the same bytes of the same file: how much of a file is in the processor's cache, and in how long
    # runs it lies in memory, made 5 to 10 % between one and another.
    (file,) = (place / "checkpoint").glob("*.safetensors")
    base = file.stat().st_size - (MIB << 20)
    actions = {
        f"{name}, {threads} thread{'s' * (threads > 1)}": lambda threads=threads: timed(
            lambda: bare_read(file, target, threads, base)
        )
        for name in ("floor", "again")
        for threads in (1, 2)
    }

    def ours() -> float:
        return timed(lambda: hyper_ckpt.load(target, place / "checkpoint", verify=verify) and None)

    order = {**dict(list(actions.items())[:2]), "hyper-ckpt": ours, **dict(list(actions.items())[2:])}
    if verify != "off":
        order["bare, digested"] = lambda: timed(lambda: bare_verified_read(file, target, base))
    report(f"load, verify={verify!r}, {place.name}", interleaved(order), statistics.median)
    assert all(np.array_equal(target[name], array) for name, array in state.items())
