"""Real processes, really killed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hyper_ckpt
from hyper_ckpt.contracts.store import Sink
from hyper_ckpt.errors import CheckpointNotFoundError, RankFailedError, RankTimeoutError
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.testing.launch import launch

VICTIM = 2
TIMEOUT = 3.0


def state(rank: int, value: float) -> dict[str, Any]:
    return {"shared": torch.full((300_000,), value), "own": hyper_ckpt.PerRank(rank)}


def join_gloo(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def save_and_die(rank: int, world_size: int, root: str) -> str:
    """Rank 2 is killed when its data file is there, but empty."""
    join_gloo(rank, world_size)
    hyper_ckpt.save(state(rank, 1.0), f"{root}/step-1")
    create = LocalStore.create

    def fatal(self: LocalStore, name: str, size: int) -> Sink:
        create(self, name, size)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    if rank == VICTIM:
        LocalStore.create = fatal  # type: ignore[method-assign]
    for path in (f"{root}/step-2", f"{root}/step-1"):
        start = time.monotonic()
        with pytest.raises((RankTimeoutError, RankFailedError), match="rank") as caught:
            hyper_ckpt.save(state(rank, 2.0), path, overwrite=True, timeout=TIMEOUT)
        assert time.monotonic() - start < 4 * TIMEOUT
        if path.endswith("step-2"):
            assert isinstance(caught.value, RankTimeoutError)
            assert caught.value.ranks == (VICTIM,)
    os._exit(0)  # gloo's own shutdown would wait for the dead


def test_a_killed_rank_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    launch(4, save_and_die, (str(tmp_path),), timeout=50, expect={VICTIM: -signal.SIGKILL})
    with pytest.raises(CheckpointNotFoundError, match="did not finish"):
        hyper_ckpt.read(tmp_path / "step-2")
    assert hyper_ckpt.read(tmp_path / "step-1")["shared"].tolist() == [1.0] * 300_000
    assert hyper_ckpt.verify(tmp_path / "step-1").ok


def save_and_leave_at_once(rank: int, world_size: int, root: str) -> None:
    """Rank 0 hosts the store: it must not leave before the others know that all is well."""
    join_gloo(rank, world_size)
    hyper_ckpt.save(state(rank, 1.0), f"{root}/step-1", durable=False)
    os._exit(0)


def test_ranks_may_leave_right_after_a_save(tmp_path: Path) -> None:
    for attempt in range(3):
        launch(4, save_and_leave_at_once, (str(tmp_path / str(attempt)),), timeout=50)
        assert hyper_ckpt.verify(tmp_path / str(attempt) / "step-1").ok


def stop_one_and_save(rank: int, world_size: int, root: str) -> str:
    """Rank 1 is stopped, not dead, between the meeting and the first collective."""
    join_gloo(rank, world_size)
    hyper_ckpt.save(state(rank, 1.0), f"{root}/step-1")
    if rank == 1:
        from hyper_ckpt.agreement.exchange import Exchange

        Exchange.run = lambda self: time.sleep(12)  # type: ignore[method-assign,assign,return-value]
    start = time.monotonic()
    with pytest.raises(hyper_ckpt.CheckpointError):
        hyper_ckpt.save(state(rank, 2.0), f"{root}/step-2", timeout=TIMEOUT)
    if rank != 1:
        assert time.monotonic() - start < 4 * TIMEOUT
    os._exit(0)


def test_a_rank_that_hangs_in_a_collective_keeps_nobody_past_the_deadline(tmp_path: Path) -> None:
    launch(3, stop_one_and_save, (str(tmp_path),), timeout=50)
    assert hyper_ckpt.verify(tmp_path / "step-1").ok
