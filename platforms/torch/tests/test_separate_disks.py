"""One path, but a disk of its own on one node: real processes, one of them in a mount namespace with its own tmpfs."""

import ctypes
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hyper_ckpt
from hyper_ckpt.engine import visible
from hyper_ckpt.errors import StoreError
from hyper_ckpt.testing.launch import launch

MS_PRIVATE_REC, CLONE_NEWNS = 1 << 18 | 1 << 14, 0x20000


def mount_own_disk(path: str) -> bool:
    """Mounts a tmpfs at `path` that only this process sees; False where it may not."""
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, MS_PRIVATE_REC, None) == 0
        and libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, b"size=8m") == 0
    )


def save_to_separate_disks(rank: int, world_size: int, root: str) -> list[str]:
    if rank == 1 and not mount_own_disk(root):
        raise OSError("no mount namespace")
    visible.LOOK_SECONDS = 2.0
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    state = {"w": torch.arange(1000.0), "own": hyper_ckpt.PerRank(torch.full((5,), rank))}
    manager = hyper_ckpt.CheckpointManager(f"{root}/run", on_sigterm=False)
    told = []
    for call in (
        lambda: hyper_ckpt.save(state, f"{root}/a"),
        lambda: hyper_ckpt.async_save(state, f"{root}/b").result(),
        lambda: manager.save(1, state, metrics={"loss": 1.0}),
    ):
        with pytest.raises(StoreError, match=r"which rank 1 wrote.* not one file system") as caught:
            call()
        told.append(str(caught.value))
    for file in Path(root).rglob("*"):
        assert file.is_dir() or file.name == "hyper-ckpt-step.json", file
    return told


def test_a_node_local_disk_is_named(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may mount")
    pid = os.fork()
    if not pid:
        os._exit(not mount_own_disk(str(tmp_path)))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        pytest.skip("no mount namespace can be made here")
    first, second = launch(2, save_to_separate_disks, (str(tmp_path),), timeout=50)
    assert len(first.result) == 3
    assert first.result == second.result
