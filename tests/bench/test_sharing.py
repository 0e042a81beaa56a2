"""Reading once and broadcasting, beside every rank reading for itself, on real gloo processes.

Run with `make bench`; prints tables, asserts nothing about time. Every load begins after a barrier; its time is that of
the slowest rank. All lines of a table take turns in the same processes. HYPER_CKPT_BENCH_DIR chooses the disk,
HYPER_CKPT_SHARING_MIB the size of the state.
"""

import fcntl
import gc
import os
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hyper_ckpt
from hyper_ckpt import LoadOptions, LoadReport
from hyper_ckpt.api import loading
from hyper_ckpt.contracts.store import StoreSpec
from hyper_ckpt.engine import shared
from hyper_ckpt.hookspecs import hookimpl
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.testing.child import Target
from hyper_ckpt.testing.faults import Operation, WrapperStore
from hyper_ckpt.testing.pool import RankPool

from ._places import DISK, fresh
from .test_speed import REPETITIONS, WARM_UPS

# The deadline of a whole test; each run of the processes has one of its own.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

# Read here: the tests' own conftest hides it later, also from the processes, which are told by arguments.
MIB = int(os.environ.get("HYPER_CKPT_SHARING_MIB", "256"))
TENSORS = 16
SMALL_TENSORS, SMALL_BYTES = 512, 64 << 10
RATE_MIB = 200
SCHEME = "throttled"
GLOO_WORLD = str(Path(__file__).parents[2] / "platforms" / "torch" / "tests" / "gloo_world.py")
State = dict[str, torch.Tensor]


class Bucket:
    """Lets bytes pass at RATE_MIB, all processes together: who comes waits until all before have passed.

    A bucket without depth: what nobody took while nobody read is lost.

    Args:
        path: an empty file that the processes share; it holds when the last taker will have passed.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def take(self, nbytes: int) -> None:
        with open(self._path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # closing gives it back
            now = time.monotonic()  # one clock for all processes of a machine
            until = max(now, *struct.unpack("d", file.read(8) or bytes(8))) + nbytes / (RATE_MIB << 20)
            file.seek(0)
            file.write(struct.pack("d", until))
        time.sleep(until - now)


class ThrottledStore(WrapperStore):
    """A directory whose reads pass through the bucket beside it."""

    def __init__(self, url: str) -> None:
        path = url.removeprefix(f"{SCHEME}://")
        super().__init__(LocalStore(path))
        self.url, self._bucket = url, Bucket(f"{path}.bucket")

    def before(self, operation: Operation, part: Callable[[], object] | None) -> None:
        if operation.kind == "read":
            self._bucket.take(operation.nbytes)


class Plugin:
    """Announces the throttled store in this process."""

    @hookimpl
    def hyper_ckpt_stores(self) -> list[StoreSpec]:
        return [StoreSpec((SCHEME,), f"{__name__}:ThrottledStore")]


@dataclass(frozen=True)
class Line:
    """One way to load. `pack_bytes` takes the place of the product's own: 0 sends each box as a message of its own."""

    share_reads: bool | str
    pack_bytes: int | None = None


@dataclass(frozen=True)
class Taken:
    """One load on one rank: seconds of all of it, of its broadcasts and of measuring how to read."""

    seconds: float
    broadcasts: float
    probe: float
    report: LoadReport


Rows = dict[str, list[Taken]]


def make_state(tensors: int, nbytes: int) -> State:
    """The same in every process."""
    generator = torch.Generator().manual_seed(0)
    return {f"t{i:03}": torch.rand(nbytes // 4, generator=generator) for i in range(tensors)}


def clocked(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[float]:
    """Seconds of each call of a function of the product, as long as the patch lasts."""
    inner, spent = getattr(owner, name), []

    def outer(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return inner(*args)
        finally:
            spent.append(time.perf_counter() - begin)

    patch.setattr(owner, name, outer)
    return spent


def one_load(target: State, url: str, line: Line) -> Taken:
    with pytest.MonkeyPatch.context() as patch:
        if line.pack_bytes is not None:
            patch.setattr(shared, "PACK_BYTES", line.pack_bytes)
        exchange = clocked(patch, shared.SharedPart, "exchange")
        probe = clocked(patch, loading, "choose_sharing")
        gc.collect()  # before the barrier: a rank that collects longer would keep the others waiting in the clock
        dist.barrier()
        begin = time.perf_counter()
        report = hyper_ckpt.load(
            target, url, share_reads=line.share_reads, timeout=60, options=LoadOptions(progress=False)
        )
        return Taken(time.perf_counter() - begin, sum(exchange), sum(probe), report)


def run_lines(
    rank: int, world_size: int, url: str, shape: tuple[int, int], lines: dict[str, Line], repetitions: int
) -> Rows:
    """On each rank: all lines, in turns."""
    if SCHEME not in {plugin.name for plugin in registry().plugins()}:
        registry().register(Plugin(), SCHEME)
    expected = make_state(*shape)
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    rows: Rows = {name: [] for name in lines}
    for _ in range(repetitions):
        for name, line in lines.items():
            for tensor in target.values():
                tensor.fill_(-1)  # what the load before left must not pass for this one's
            rows[name].append(one_load(target, url, line))
            assert all(torch.equal(target[key], tensor) for key, tensor in expected.items())
    return rows


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    yield from fresh(DISK / "bench-sharing")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@dataclass(frozen=True)
class Bench:
    """What the ranks of one world took, warm-ups first."""

    ranks: list[Rows]
    warm_ups: int

    def slowest(self, name: str, of: Callable[[Taken], float]) -> float:
        """Of the slowest rank; the median of the repetitions."""
        times = zip(*(rows[name] for rows in self.ranks), strict=True)
        return statistics.median(max(map(of, taken)) for taken in list(times)[self.warm_ups :])

    def reports(self, name: str) -> list[LoadReport]:
        """Of each rank, the last."""
        return [rows[name][-1].report for rows in self.ranks]


def measure(
    pool: RankPool,
    place: Path,
    world_size: int,
    url: str,
    shape: tuple[int, int],
    lines: dict[str, Line],
    warm_ups: int = WARM_UPS,
    repetitions: int = REPETITIONS,
) -> Bench:
    """Runs the lines on processes that form a gloo world for it. `shape`: how many tensors of how many bytes."""
    store = place / f"gloo-{time.monotonic_ns()}"
    arguments = (url, shape, lines, warm_ups + repetitions)
    ranks = pool.run(
        f"{GLOO_WORLD}:run",
        str(store),
        Target.of(run_lines),
        arguments,
        world_size=world_size,
        timeout=400.0,
    )
    return Bench(ranks, warm_ups)


def show(title: str, bench: Bench, base: str) -> None:
    """One line each: seconds, beside `base`; where they went; what was decided; bytes that all ranks read."""
    print(f"\n{title}; medians of the slowest rank's seconds")
    print(f"  {'':12}     load           prepare metadata   plan    read | probe bcasts | shared  MiB read")
    for name, taken in bench.ranks[0].items():
        seconds = bench.slowest(name, lambda t: t.seconds)
        phases = [
            bench.slowest(name, lambda t, p=phase: t.report.seconds[p])
            for phase in ("prepare", "metadata", "plan", "read")
        ]
        inner = bench.slowest(name, lambda t: t.probe), bench.slowest(name, lambda t: t.broadcasts)
        counted = [t.report.shared_reads for t in taken[bench.warm_ups :]]
        read = sum(report.bytes_read for report in bench.reports(name)) / (1 << 20)
        print(
            f"  {name:12} {seconds:8.4f} s {seconds / bench.slowest(base, lambda t: t.seconds):6.3f} x"
            f" {phases[0]:8.4f} {phases[1]:8.4f} {phases[2]:7.4f} {phases[3]:7.4f} | {inner[0]:.4f} {inner[1]:.4f} |"
            f" {sum(counted)} of {len(counted)} {read:8.1f}"
        )


def first_probe(bench: Bench) -> None:
    """A platform measures its broadcasts once: the first load that asks pays for it."""
    first = max(rows["auto"][0].probe for rows in bench.ranks)
    print(f"  the probe of the first load that asked, a warm-up, took {first:.4f} s")


SHAPE = (TENSORS, (MIB << 20) // TENSORS)
LINES = {"unshared": Line(False), "shared": Line(True), "auto": Line("auto")}


@pytest.fixture(scope="module")
def large(place: Path) -> Path:
    hyper_ckpt.save(make_state(*SHAPE), place / "large", durable=False)
    (place / "large.bucket").touch()
    return place / "large"


@pytest.mark.parametrize("world_size", [2, 4])
def test_throttled_store(pool: RankPool, place: Path, large: Path, world_size: int) -> None:
    url = f"{SCHEME}://{large}"
    # Few, since they are long and the bucket is what they wait for.
    bench = measure(pool, place, world_size, url, SHAPE, LINES, warm_ups=1, repetitions=3)
    show(f"{MIB} MiB on {world_size} ranks, a store of {RATE_MIB} MiB/s in all, 3 repetitions", bench, "unshared")
    first_probe(bench)


@pytest.mark.parametrize("world_size", [2, 4])
def test_unthrottled_store(pool: RankPool, place: Path, large: Path, world_size: int) -> None:
    lines = {**LINES, "again": Line(False)}
    bench = measure(pool, place, world_size, str(large), SHAPE, lines)
    show(f"{MIB} MiB on {world_size} ranks, page cache, {REPETITIONS} repetitions", bench, "unshared")
    first_probe(bench)
    times = {name: bench.slowest(name, lambda t: t.seconds) for name in lines}
    print(f"  auto beside the better choice: {times['auto'] / min(times['unshared'], times['shared']):.3f}")
    print(f"  unshared against itself: {times['again'] / times['unshared']:.3f}")


def test_packed_broadcasts(pool: RankPool, place: Path) -> None:
    shape, world_size = (SMALL_TENSORS, SMALL_BYTES), 4
    hyper_ckpt.save(make_state(*shape), place / "small", durable=False)
    lines = {
        "packed": Line(True),
        "one by one": Line(True, pack_bytes=0),
        "unshared": Line(False),
        "again": Line(True),
    }
    bench = measure(pool, place, world_size, str(place / "small"), shape, lines)
    title = f"{SMALL_TENSORS} tensors of {SMALL_BYTES >> 10} KiB on {world_size} ranks, {REPETITIONS} repetitions"
    show(title, bench, "packed")
    for name in lines:
        report = bench.reports(name)[0]
        counts = f"{report.shared_boxes} shared boxes, {report.broadcasts} broadcasts, {report.packed_boxes} packed"
        print(f"  {name:12} on rank 0: {counts}")
    for what, of in (("broadcasts", lambda t: t.broadcasts), ("whole load", lambda t: t.seconds)):
        times = {name: bench.slowest(name, of) for name in lines}
        print(f"  {what}: packed {times['one by one'] / times['packed']:.2f} times as fast as one by one", end="")
        print(f" (packed against itself: {times['again'] / times['packed']:.3f})")
