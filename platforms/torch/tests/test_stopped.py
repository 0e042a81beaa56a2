"""Rank 0 is stopped, not dead, at any point: all others raise an error that names it; later calls find it again."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hyper_ckpt
from hyper_ckpt.agreement import Operation
from hyper_ckpt.agreement.exchange import Exchange
from hyper_ckpt.errors import CheckpointError, RankTimeoutError
from hyper_ckpt.manager.schedule import SaveInterval, Schedule
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.testing.launch import launch

TIMEOUT = 3.0


def stop(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Stops:
    """Stops the process while its state is collected."""

    def state_dict(self) -> dict[str, Any]:
        stop()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def before(owner: type, name: str) -> None:
    """Has this process stopped when a method is called, before that runs."""
    original = getattr(owner, name)

    def stopping(*args: Any, **kwargs: Any) -> Any:
        stop()
        return original(*args, **kwargs)

    setattr(owner, name, stopping)


def state(rank: int) -> dict[str, Any]:
    return {"shared": torch.full((1000,), 1.0), "own": hyper_ckpt.PerRank(rank)}


def stop_rank_zero(where: str, state: dict[str, Any]) -> None:
    if where == "collecting":
        state["stops"] = Stops()
    elif where == "exchanging":
        before(Exchange, "run")
    elif where == "deciding":
        before(Operation, "_lead")
    elif where == "writing":
        before(LocalStore, "create")
    elif where == "publishing":
        before(LocalStore, "publish")
    elif where == "batches":
        before(Operation, "batch_ready")
    elif where == "parting":
        before(Operation, "_part")
    else:
        assert where == "reading"
        before(LocalStore, "read_into")


def call_without_rank_zero(rank: int, world_size: int, root: str, call: str, where: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    path = f"{root}/step-1"
    hyper_ckpt.save(state(rank), path)
    target = state(rank)
    if rank == 0:
        stop_rank_zero(where, target)

    def run() -> None:
        if call == "save":
            hyper_ckpt.save(target, f"{root}/step-2", timeout=TIMEOUT)
        else:
            hyper_ckpt.load(target, path, timeout=TIMEOUT, share_reads=True)

    if rank == 0:
        Path(f"{root}/pid").write_text(str(os.getpid()))
        run()  # never ends: it is killed
        raise AssertionError("unreachable")
    try:
        run()
        outcome = "returned"
    except RankTimeoutError as error:
        outcome = f"RankTimeoutError {error.ranks}"
    Path(f"{root}/rank{rank}").write_text(outcome)
    while not all(Path(f"{root}/rank{each}").exists() for each in range(1, world_size)):
        time.sleep(0.02)
    if rank == 1:
        begin = time.monotonic()
        with pytest.raises(CheckpointError, match="rank 0"):
            hyper_ckpt.save(state(rank), f"{root}/step-3", timeout=1000)  # not waited for as long once more
        assert time.monotonic() - begin < 500
        os.kill(int(Path(f"{root}/pid").read_text()), signal.SIGKILL)
    os._exit(0)


@pytest.mark.parametrize(
    ("call", "where"),
    [
        ("save", "collecting"),
        ("save", "exchanging"),
        ("save", "deciding"),
        ("save", "writing"),
        ("save", "publishing"),
        ("save", "parting"),
        ("load", "reading"),
        ("load", "batches"),
        ("load", "parting"),
    ],
)
def test_a_stopped_rank_zero_is_named_by_all_others(tmp_path: Path, call: str, where: str) -> None:
    launch(3, call_without_rank_zero, (str(tmp_path), call, where), timeout=50, expect={0: -signal.SIGKILL})
    outcomes = {Path(tmp_path / f"rank{rank}").read_text() for rank in (1, 2)}
    # At the very end it is a matter of moments whether the others have heard that all is well.
    assert outcomes <= {"RankTimeoutError (0,)"} | ({"returned"} if where == "parting" else set())
    assert where != "parting" or call != "save" or hyper_ckpt.verify(tmp_path / "step-2").ok


def go_on_afterwards(rank: int, world_size: int, root: str) -> None:
    """Rank 0 is stopped for longer than a save may take, and goes on."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    hyper_ckpt.save(state(rank), f"{root}/step-1")
    target = state(rank)
    if rank == 0:
        target["stops"] = Stops()
        Path(f"{root}/pid").write_text(str(os.getpid()))
    with pytest.raises(CheckpointError):
        hyper_ckpt.save(target, f"{root}/step-2", timeout=TIMEOUT)
    if rank == 1:
        os.kill(int(Path(f"{root}/pid").read_text()), signal.SIGCONT)
    target.pop("stops", None)
    for attempt in range(20):
        try:
            hyper_ckpt.save(target, f"{root}/step-3", overwrite=True, timeout=TIMEOUT)
            break
        except CheckpointError:
            if attempt == 19:
                raise
    Path(f"{root}/rank{rank}").write_text("saved")
    os._exit(0)


def test_a_rank_zero_that_goes_on_is_found_again(tmp_path: Path) -> None:
    launch(2, go_on_afterwards, (str(tmp_path),), timeout=50)
    assert hyper_ckpt.verify(tmp_path / "step-3").ok


def ask_without_rank_zero(rank: int, world_size: int, root: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    hyper_ckpt.save(state(rank), f"{root}/step-1", timeout=TIMEOUT)
    from hyper_ckpt_torch.platform import default

    schedule = Schedule(default().ranks, SaveInterval(minutes=1), True, "key")
    schedule.due(1)
    dist.barrier()
    if rank == 0:
        Path(f"{root}/pid").write_text(str(os.getpid()))
        stop()
    pid = Path(f"{root}/pid")
    while not pid.exists() or Path(f"/proc/{pid.read_text()}/stat").read_text().split()[2] != "T":
        time.sleep(0.02)
    schedule.ask()
    for step in (2, 3):
        with pytest.raises(RankTimeoutError, match="rank 0") as caught:
            schedule.due(step)
        assert caught.value.ranks == (0,)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    os._exit(0)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks into /proc")
def test_should_save_does_not_wait_for_a_stopped_rank_zero(tmp_path: Path) -> None:
    launch(2, ask_without_rank_zero, (str(tmp_path),), timeout=50, expect={0: -signal.SIGKILL})


def join_without_rank_zero(rank: int, world_size: int, root: str) -> None:
    """Rank 0, whose process also hosts torch's store, is stopped before its first call."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    dist.barrier()
    if rank == 0:
        Path(f"{root}/pid").write_text(str(os.getpid()))
        stop()
    pid = Path(f"{root}/pid")
    while not pid.exists() or Path(f"/proc/{pid.read_text()}/stat").read_text().split()[2] != "T":
        time.sleep(0.02)
    with pytest.raises(RankTimeoutError, match="rank 0") as caught:
        hyper_ckpt.save(state(rank), f"{root}/step-1", timeout=TIMEOUT)
    assert caught.value.ranks == (0,)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    os._exit(0)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks into /proc")
def test_a_first_save_does_not_hang_in_torchs_store(tmp_path: Path) -> None:
    launch(2, join_without_rank_zero, (str(tmp_path),), timeout=50, expect={0: -signal.SIGKILL})


def fail_often(rank: int, world_size: int, root: str) -> list[int]:
    """How many keys the store holds, after each of some failures, and once more after a save that went well."""
    from hyper_ckpt_torch.platform import default

    path = f"{root}/step-1"
    hyper_ckpt.save(state(rank), path)
    counts = []

    def count(calls: int, action: Callable[[], object]) -> None:
        for _ in range(calls):
            action()
        dist.barrier()
        if rank == 0:
            counts.append(len(default().ranks.key_value_store.keys()))  # type: ignore[attr-defined]
        dist.barrier()

    def refused() -> None:
        with pytest.raises(CheckpointError):
            hyper_ckpt.load({"shared": torch.zeros(7)}, path)

    def damaged() -> None:
        with pytest.raises(CheckpointError):
            hyper_ckpt.load(state(rank), f"{root}/none")

    def unsaved() -> None:
        with pytest.raises(CheckpointError):
            hyper_ckpt.save(state(rank) | ({"bad": threading.Lock()} if rank == 1 else {}), f"{root}/step-2")

    count(1, lambda: hyper_ckpt.load(state(rank), path, share_reads=True))
    count(10, refused)
    count(10, damaged)
    count(10, unsaved)
    count(5, lambda: hyper_ckpt.load(state(rank), path, share_reads=True))
    return counts


def test_calls_leave_no_keys_behind_however_they_end(gloo, tmp_path):
    counts = gloo(fail_often, str(tmp_path), world_size=3)[0]
    assert len(set(counts)) == 1, counts
