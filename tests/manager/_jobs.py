"""A small training as a job of real processes, which can be killed at any moment."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from hyper_ckpt import CheckpointManager, PerRank, Retention, SaveInterval, ShardedTensor
from hyper_ckpt.errors import RankFailedError, RankTimeoutError
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt_sample import framework

ROWS, COLUMNS = 40, 500
STEPS, EVERY = 200, 5


def join(rank: int, world_size: int) -> None:
    framework.init_process_group(rank, world_size, int(os.environ["MASTER_PORT"]))


class Training:
    """Deterministic from any step on, given its state."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.weights = np.zeros((ROWS, COLUMNS))
        self.chance = np.random.default_rng(rank)
        whole = (ROWS * world_size, COLUMNS)
        self.state: dict[str, Any] = {
            "weights": ShardedTensor([(self.weights, (ROWS * rank, 0))], whole),
            "chance": PerRank(self.chance),
            "step": 0,
            "seen": [0] * 4,
        }

    def advance(self, step: int) -> None:
        self.weights += self.chance.normal(size=self.weights.shape)
        self.state["step"] = step
        self.state["seen"] = [*self.state["seen"][-3:], step]

    def result(self) -> tuple[bytes, int, list[int], float]:
        return self.weights.tobytes(), self.state["step"], self.state["seen"], float(self.chance.normal())


def die_after(seconds: float) -> None:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def train(rank: int, world_size: int, root: str, log: str, delays: dict[int, float]) -> Any:
    """Trains to the end, or until killed `delays[rank]` seconds after it began. Notes where it began, and each save."""
    join(rank, world_size)
    training = Training(rank, world_size)
    fd = os.open(f"{log}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    timeout = 2.0 if delays else 30.0
    manager = CheckpointManager(root, interval=SaveInterval(steps=EVERY), retention=Retention(last=2), leftover_age=0.0)
    if rank in delays:
        die_after(delays[rank])
    try:
        with manager:
            found = manager.restore(training.state, timeout=timeout)
            first = found.step + 1 if found else 1
            os.write(fd, f"begin {first}\n".encode())
            for step in range(first, STEPS + 1):
                training.advance(step)
                if manager.should_save(step):
                    handle = manager.async_save(step, training.state, metrics={"loss": 1.0 / step}, timeout=timeout)
                    os.write(fd, f"save {step}\n".encode())
                    handle.wait_staged()
                if delays:
                    time.sleep(0.01)
            while rank in delays:
                time.sleep(1)
    except (RankFailedError, RankTimeoutError):
        if not delays:
            raise
        if rank in delays:
            time.sleep(60)  # it is killed in a moment
        os._exit(0)  # the other rank was killed
    return training.result()


def logged(log: Path, what: str) -> list[int]:
    """The numbers noted in all logs of one job."""
    lines = [line for path in log.parent.glob(f"{log.name}-*") for line in path.read_text().splitlines()]
    return [int(line.split()[1]) for line in lines if line.startswith(f"{what} ")]


def preempted(rank: int, world_size: int, root: str, told: tuple[int, ...], at: int, slow: float) -> dict[str, Any]:
    """Trains until it is told to end: the ranks `told` get a SIGTERM after step `at`, with a save in flight."""
    join(rank, world_size)
    heard: list[int] = []
    signal.signal(signal.SIGTERM, before := lambda number, _: heard.append(number))
    create = LocalStore.create
    LocalStore.create = lambda *args: (time.sleep(slow), create(*args))[1]  # type: ignore[method-assign]
    training, saved = Training(rank, world_size), []
    with CheckpointManager(root, interval=SaveInterval(steps=5, lead=1)) as manager:
        handle = None
        for step in range(1, 100):
            training.advance(step)
            # In place of a training's own collective: nobody is a step ahead.
            manager._platform.ranks.all_gather_object(step)
            if rank in told and step == at:
                assert handle is not None
                assert not handle.done()
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                saved.append(step)
                handle = manager.async_save(step, training.state, timeout=30)
            if manager.preempted:
                break
    return {
        "saved": saved,
        "step": training.state["step"],
        "heard": heard,
        "left": signal.getsignal(signal.SIGTERM) is not before,
        "weights": training.weights.tobytes(),
    }
