"""examples/train_loop.py: told to end, killed, started again, and equal bit for bit to a run that nobody disturbed."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.testing.processes import RankProcess, free_port, rank_environment

pytest.importorskip("torch")

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_loop.py"
EVERY = 10
ATTEMPTS = 3  # a run may have ended before the signal came


@contextmanager
def running(world_size: int, folder: Path, steps: int) -> Iterator[list[RankProcess]]:
    port, ranks = free_port(), list[RankProcess]()
    command = [sys.executable, str(SCRIPT), str(folder), "--steps", str(steps), "--every", str(EVERY)]
    try:
        for rank in range(world_size):
            env = rank_environment(rank, world_size, port, {"GLOO_SOCKET_IFNAME": "lo"})
            ranks.append(RankProcess(command, env))
        yield ranks
    finally:
        for each in ranks:
            each.close()


def wait(ranks: list[RankProcess], until: Callable[[], bool], seconds: float = 50.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, [each.output() for each in ranks]
        assert all(each.exit_code() in (None, 0) for each in ranks), [each.output() for each in ranks]
        if all(each.ended() for each in ranks):
            return
        time.sleep(0.002)


def complete(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[len("step-") :]) for path in folder.glob("step-*/manifest.json"))


def train(world_size: int, folder: Path, steps: int) -> None:
    with running(world_size, folder, steps) as ranks:
        wait(ranks, lambda: all(each.ended() for each in ranks))
        assert [each.exit_code() for each in ranks] == [0] * world_size


def interrupt(world_size: int, folder: Path, steps: int, number: signal.Signals, victims: list[int]) -> list[int]:
    """Sends a signal to ranks once there is a new checkpoint. Returns all exit codes."""
    before = max(complete(folder), default=0)
    with running(world_size, folder, steps) as ranks:
        wait(ranks, lambda: max(complete(folder), default=0) > before)
        for rank in victims:
            if not ranks[rank].ended():
                os.kill(ranks[rank].pid, number)
        wait_for = time.monotonic() + 30
        while not all(each.ended() for each in ranks) and time.monotonic() < wait_for:
            time.sleep(0.01)
        return [each.exit_code() or 0 for each in ranks]


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, hyper_ckpt.PerRank):
        return flat(value.value, name)
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{name}/{key}").items()}
    if isinstance(value, np.ndarray):
        return {name: (value.dtype, value.shape, value.tobytes())}
    return {name: value.get_state().numpy().tobytes() if hasattr(value, "get_state") else value}


@pytest.mark.parametrize(("world_size", "steps"), [(1, 400), (2, 200)])
@pytest.mark.timeout(200)  # four runs, each of which imports torch
def test_it_goes_on_where_it_was(tmp_path: Path, world_size: int, steps: int) -> None:
    train(world_size, tmp_path / "reference", steps)
    expected = flat(hyper_ckpt.read(tmp_path / "reference" / f"step-{steps:010d}"))
    assert any("exp_avg_sq" in name for name in expected)
    for attempt in range(ATTEMPTS):
        run = tmp_path / f"run-{attempt}"
        # To one rank only: all save at the same step, and end well.
        told = interrupt(world_size, run, steps, signal.SIGTERM, [world_size - 1])
        assert told == [0] * world_size
        stopped_at = complete(run)[-1]
        killed = interrupt(world_size, run, steps, signal.SIGKILL, list(range(world_size)))
        if stopped_at < steps and killed == [-signal.SIGKILL] * world_size:
            break
    else:
        pytest.fail(f"{ATTEMPTS} runs ended before they were disturbed")
    assert stopped_at <= complete(run)[-1] < steps
    train(world_size, run, steps)
    assert flat(hyper_ckpt.read(run / f"step-{steps:010d}")) == expected
    assert len(complete(run)) == 3, "older ones are removed"
