"""Asynchronous saves on gloo ranks whose main threads use collectives of their own all the while."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hyper_ckpt
from hyper_ckpt import SaveOptions

Gloo = Callable[..., list[Any]]


def saves_beside_barriers(rank: int, world_size: int, path: str, executor: str) -> list[float]:
    weight, options = torch.zeros(1 << 18), SaveOptions(executor=executor)
    handles = []
    for step in range(4):
        weight.fill_(step)
        handles.append(
            hyper_ckpt.async_save({"w": weight, "step": step}, f"{path}/{step}", timeout=40, options=options)
        )
        weight.fill_(-1)  # staged: the save has its copy
        for _ in range(20):
            dist.barrier()
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == world_size
    return [handle.result(40).created for handle in handles]


def check(gloo: Gloo, path: Path, executor: str) -> None:
    created = gloo(saves_beside_barriers, str(path), executor, world_size=2)
    assert created[0] == sorted(created[0])
    for step in range(4):
        state = hyper_ckpt.read(path / str(step))
        assert (state["w"] == step).all()
        assert state["step"] == step
    manifests = [(path / str(step) / "manifest.json").stat().st_mtime_ns for step in range(4)]
    assert manifests == sorted(manifests), "in the order of the calls"


def test_four_saves_beside_barriers(gloo: Gloo, tmp_path: Path) -> None:
    check(gloo, tmp_path, "thread")


def test_four_saves_beside_barriers_written_by_processes(gloo: Gloo, tmp_path: Path) -> None:
    check(gloo, tmp_path, "process")
