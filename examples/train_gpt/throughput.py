"""How fast saving and loading are, beside a bare loop that moves the same bytes through files of the same sizes.

A disk's speed changes from one minute to the next, so only ratios mean something. The library and the bare
loop take turns, on all ranks at once, with warm buffers. The bare loop runs twice in every round: how far it
is from itself tells how much a ratio can be trusted.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import hyper_ckpt
from hyper_ckpt.storage.syscalls import preallocate

BLOCK = 8 << 20
WARM_UPS = 2

Action = Callable[[], object]


def measure(state: dict[str, Any], folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of a save and a load, each beside its floor, and of a load's phases. All ranks call it."""
    rank = dist.get_rank()
    checkpoint, saved, bare = folder / "loaded", folder / "saved", folder / f"bare-{rank}"
    hyper_ckpt.save(state, checkpoint)
    mine = next(checkpoint.glob(f"rank-{rank:05d}-*.safetensors"))
    data = np.fromfile(mine, np.uint8)
    phases: dict[str, float] = {}

    def clear() -> None:
        """Before every turn: what the last one wrote is gone, and nothing waits to be written."""
        bare.unlink(missing_ok=True)
        if rank == 0:
            shutil.rmtree(saved, ignore_errors=True)
            os.sync()
        dist.barrier()

    def save() -> None:
        hyper_ckpt.save(state, saved)

    def load() -> None:
        nonlocal phases
        phases = hyper_ckpt.load(state, checkpoint).seconds

    times = {
        "save": _take_turns(save, lambda: _write(bare, data), clear, rounds, min),
        "load": _take_turns(load, lambda: _read(mine, data), clear, rounds, statistics.median),
    }
    clear()
    if rank == 0:
        shutil.rmtree(checkpoint)
    return {**times, "phases of a load": phases}


def _take_turns(
    ours: Action, floor: Action, clear: Action, rounds: int, pick: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    turns = {"ours": ours, "floor": floor, "floor again": floor}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(WARM_UPS + rounds):
        for name, action in turns.items():
            clear()
            start = time.perf_counter()
            action()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {name: pick(each[WARM_UPS:]) for name, each in seconds.items()}


def _write(path: Path, data: np.ndarray) -> None:
    with path.open("wb", buffering=0) as file:
        preallocate(file.fileno(), len(data))
        for start in range(0, len(data), BLOCK):
            os.pwrite(file.fileno(), data[start : start + BLOCK], start)
        os.fsync(file.fileno())


def _read(path: Path, into: np.ndarray) -> None:
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(into), BLOCK):
            os.preadv(file.fileno(), [into[start : start + BLOCK]], start)
