"""What an asynchronous save costs the training loop: the stall of the call, and slower steps while it is in flight.

Run with `make bench`; prints tables, asserts nothing about time. The stall is compared with `np.copyto` of the same
bytes into warm buffers, and with `torch.distributed.checkpoint.async_save`, in turns. HYPER_CKPT_BENCH_DIR chooses the
disk, HYPER_CKPT_ASYNC_MIB the size.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import hyper_ckpt
from hyper_ckpt import SaveOptions
from hyper_ckpt.agreement import Operation
from hyper_ckpt.api.saving import Saving
from hyper_ckpt.api.writing import Part

from ._places import DISK, fresh
from .test_speed import interleaved, timed

pytestmark = pytest.mark.bench

MIB = int(os.environ.get("HYPER_CKPT_ASYNC_MIB", "1024"))
TENSORS = 64


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    yield from fresh(DISK / "bench-async")


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    count = (MIB << 20) // TENSORS // 4
    return {f"t{i}": torch.rand(count) for i in range(TENSORS)}


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """DCP's async_save wants a process group."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def copy(state: dict[str, torch.Tensor], buffers: list[np.ndarray], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.copyto, buffers, [t.numpy() for t in state.values()]))


def stalls(place: Path, name: str, start: Callable[[str], Callable[[], object]]) -> Callable[[], float]:
    """The time until the state may be changed; what follows is outside the clock."""
    numbers = iter(range(1_000_000))

    def run() -> float:
        path = place / f"{name}-{next(numbers)}"
        os.sync()
        finish: list[Callable[[], object]] = []
        seconds = timed(lambda: finish.append(start(str(path))))
        finish[0]()
        shutil.rmtree(path)
        return seconds

    return run


def ours(state: dict[str, torch.Tensor], executor: str) -> Callable[[str], Callable[[], object]]:
    def start(path: str) -> Callable[[], object]:
        options = SaveOptions(executor=executor)
        handle = hyper_ckpt.async_save(dict(state), path, durable=False, options=options)
        handle.wait_staged()
        return handle.result

    return start


def theirs(state: dict[str, torch.Tensor]) -> Callable[[str], Callable[[], object]]:
    return lambda path: dcp.async_save(dict(state), checkpoint_id=path).result


def test_stall(place: Path, state: dict[str, torch.Tensor]) -> None:
    buffers = [np.zeros(t.numel(), np.float32) for t in state.values()]
    floors = {
        f"{name}, {n} thread{'s' * (n > 1)}": lambda n=n: timed(lambda: copy(state, buffers, n))
        for name in ("copy", "again")
        for n in (1, 2)
    }
    actions = {
        **dict(list(floors.items())[:2]),
        "thread": stalls(place, "thread", ours(state, "thread")),
        "process": stalls(place, "process", ours(state, "process")),
        f"DCP {torch.__version__}": stalls(place, "dcp", theirs(state)),
        **dict(list(floors.items())[2:]),
    }
    rows = {name: statistics.median(seconds) for name, seconds in interleaved(actions).items()}
    floor = min(rows["copy, 1 thread"], rows["copy, 2 threads"])
    again = min(rows["again, 1 thread"], rows["again, 2 threads"])
    print(f"\nstall of async_save, {MIB} MiB, medians")
    for name, seconds in rows.items():
        print(f"  {name:18} {seconds:7.3f} s  {seconds / floor:5.2f} x the copy")
    print(f"  floor against itself: {again / floor:.3f}")


def step(matrix: torch.Tensor) -> None:
    """A step that is busy in C and in the interpreter."""
    for _ in range(4):
        matrix @ matrix
    sum(i * i for i in range(20_000))


def interpreter_step(matrix: torch.Tensor) -> None:
    """A step that holds the interpreter's lock all the time."""
    sum(i * i for i in range(60_000))


@pytest.mark.parametrize("step", [step, interpreter_step])
def test_steps(place: Path, state: dict[str, torch.Tensor], step: Callable[[torch.Tensor], None]) -> None:
    """Time of steps, on one thread, without a save and with one in flight, in turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix, numbers = torch.rand(400, 400), iter(range(1_000_000))
    starters = {"thread": ours(state, "thread"), "process": ours(state, "process"), "DCP": theirs(state)}
    rows: dict[str, list[float]] = {"no save": [], **{name: [] for name in starters}}
    for repetition in range(7):
        for name in rows:
            steps: list[float] = []
            path = place / f"steps-{name}-{next(numbers)}"
            os.sync()
            finish = starters[name](str(path)) if name in starters else None
            is_over = Over(finish)
            while (not is_over() if finish else len(steps) < 60) and len(steps) < 400:
                begin = time.perf_counter()
                step(matrix)
                steps.append(time.perf_counter() - begin)
            is_over.wait()
            if finish:
                shutil.rmtree(path)
            if repetition:
                rows[name] += steps
    torch.set_num_threads(threads)
    print(f"\nsteps ({step.__name__}) with a save of {MIB} MiB in flight: mean, and steps until 6 saves were over")
    alone = statistics.mean(rows["no save"])
    for name, seconds in rows.items():
        mean = statistics.mean(seconds)
        print(f"  {name:18} {1000 * mean:7.2f} ms  {mean / alone:5.2f} x  ({len(seconds)} steps)")


class Over:
    """Whether a save is over, asked without waiting; what it raised is raised by `wait`."""

    def __init__(self, finish: Callable[[], object] | None) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(finish) if finish else None

    def __call__(self) -> bool:
        return self._future is None or self._future.done()

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
        self._pool.shutdown()


PLAN_TENSORS = 1000


def plain_tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.zeros(4) for i in range(PLAN_TENSORS)}


def distributed_tensors() -> dict[str, torch.Tensor]:
    """On a mesh of one: what one rank does for each is the same in every world."""
    mesh = init_device_mesh("cpu", (1,))
    return {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in plain_tensors().items()}


class Clock:
    """Milliseconds spent in some functions of the library, by what they do."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.spent: dict[str, float] = {}
        self._patch = patch

    def watch(self, what: str, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                found = inner(*args, **options)
                return list(found) if isinstance(found, Iterator) else found
            finally:
                self.spent[what] = self.spent.get(what, 0.0) + 1000 * (time.perf_counter() - begin)

        self._patch.setattr(owner, name, outer)


@pytest.mark.parametrize("make", [plain_tensors, distributed_tensors])
def test_planning(place: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], dict[str, torch.Tensor]]) -> None:
    """What a save costs before anything is copied: the first, and later ones of the same structure. Planning is all up
    to the plan but for what ranks say to each other; then the memory that pieces come from is found."""
    state, clock = make(), Clock(monkeypatch)
    clock.watch("all", Saving, "begin")
    clock.watch("talking", Operation, "meet")
    clock.watch("talking", Operation, "exchange")
    clock.watch("memory", Part, "_pieces")
    print(f"\nasync_save of {PLAN_TENSORS} {make.__name__}: ms of planning, of finding memory, and of all until staged")
    for number in range(9):
        clock.spent.clear()
        begin = time.perf_counter()
        handle = hyper_ckpt.async_save(state, place / f"{make.__name__}-{number}", durable=False)
        handle.wait_staged()
        staged = 1000 * (time.perf_counter() - begin)
        handle.result()
        planning = clock.spent["all"] - clock.spent["talking"] - clock.spent["memory"]
        print(f"  save {number}: {planning:6.1f} {clock.spent['memory']:6.1f} {staged:6.1f}")
