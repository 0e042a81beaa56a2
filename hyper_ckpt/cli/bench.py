"""The speed of a disk, and what a save and a load make of it. Floor and library take turns: machines are shared."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyper_ckpt.api.load import load
from hyper_ckpt.api.save import save
from hyper_ckpt.options import LoadOptions, SaveOptions
from hyper_ckpt.storage import syscalls
from hyper_ckpt.text import size

TENSORS, BLOCK = 16, 8 << 20
Action = Callable[[], None]


@dataclass(frozen=True)
class Line:
    """One thing that was timed: seconds, best for saves and median for loads, and the floor's seconds beside it."""

    what: str
    nbytes: int
    seconds: float
    floor: float


def run(path: str, mib: int, repetitions: int) -> list[Line]:
    """Measures in a new folder below `path`, and removes it.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = Path(tempfile.mkdtemp(prefix="hyper-ckpt-bench-", dir=path))
    try:
        return list(_Bench(folder, mib << 20, repetitions).lines())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Bench:
    def __init__(self, folder: Path, nbytes: int, repetitions: int) -> None:
        self._folder, self._repetitions = folder, repetitions
        count = nbytes // TENSORS // 4
        # Written once: memory that is touched for the first time is slow.
        self._state = {f"t{i}": np.random.default_rng(i).random(count, dtype=np.float32) for i in range(TENSORS)}
        self._nbytes = sum(a.nbytes for a in self._state.values())

    def lines(self) -> Iterator[Line]:
        quiet = SaveOptions(progress=False)
        for durable in (False, True):
            own, floor = self._save_times(durable, quiet)
            yield Line("save, durable" if durable else "save, cached", self._nbytes, own, floor)
        save(self._state, self._folder / "c", durable=False, options=quiet)
        self._write(self._folder / "bare", 1, False)
        for verify in ("off", "during"):
            options = LoadOptions(progress=False)
            floors: list[Action] = [lambda n=n: self._read(self._folder / "bare", n) for n in (1, 2)]  # type: ignore[misc]

            def loads(verify: Any = verify, options: LoadOptions = options) -> None:
                load(self._state, self._folder / "c", verify=verify, options=options)

            rows = self._interleaved([*floors, loads])
            one, two, own = (statistics.median(row) for row in rows)
            yield Line("load, verified" if verify == "during" else "load, unverified", self._nbytes, own, min(one, two))

    def _save_times(self, durable: bool, options: SaveOptions) -> tuple[float, float]:
        """The best of ours, and of the floor with one thread and two."""
        path = self._folder / "written"
        floors: list[Action] = [lambda n=n: self._write(path, n, durable) for n in (1, 2)]  # type: ignore[misc]

        def saves() -> None:
            save(self._state, path, durable=durable, options=options)

        one, two, own = (min(row) for row in self._interleaved([*floors, saves], path))
        return own, min(one, two)

    def _interleaved(self, actions: list[Action], written: Path | None = None) -> list[list[float]]:
        rows: list[list[float]] = [[] for _ in actions]
        for repetition in range(self._repetitions + 1):
            for row, action in zip(rows, actions, strict=True):
                if written is not None:
                    os.sync()
                begin = time.perf_counter()
                action()
                if repetition:
                    row.append(time.perf_counter() - begin)
                if written is not None:
                    shutil.rmtree(written) if written.is_dir() else written.unlink()
        return rows

    def _blocks(self) -> Iterator[tuple[int, memoryview]]:
        at = 0
        for array in self._state.values():
            data = array.data.cast("B")
            for start in range(0, len(data), BLOCK):
                yield at + start, data[start : start + BLOCK]
            at += len(data)

    def _write(self, path: Path, threads: int, durable: bool) -> None:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
        try:
            syscalls.preallocate(fd, self._nbytes)
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda block: syscalls.write_all(fd, block[0], block[1]), self._blocks()))
            if durable:
                syscalls.sync_file(fd)
        finally:
            os.close(fd)

    def _read(self, path: Path, threads: int) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda block: syscalls.read_all(fd, block[0], [block[1]]), self._blocks()))
        finally:
            os.close(fd)


def as_text(lines: list[Line]) -> Iterator[str]:
    """A table of speeds and fractions."""
    yield f"{'':18}{'floor':>12}{'hyper-ckpt':>14}{'of the floor':>14}"
    for line in lines:
        floor, own = (f"{line.nbytes / seconds / 1e9:.2f} GB/s" for seconds in (line.floor, line.seconds))
        yield f"{line.what:18}{floor:>12}{own:>14}{line.floor / line.seconds:>14.2f}"
    yield f"{size(lines[0].nbytes)}; saves: the best, loads: the median, from the page cache"
