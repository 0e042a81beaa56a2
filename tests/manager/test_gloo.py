"""CheckpointManager in a world of torch processes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hyper_ckpt_torch", reason="needs the PyTorch platform")

from hyper_ckpt.testing.launch import launch


def train(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Rank 1 gets a SIGTERM after step 7; the ranks then go on from what was saved."""
    import torch
    import torch.distributed as dist

    from hyper_ckpt import CheckpointManager, Retention, SaveInterval

    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    state: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
    saved = []
    with CheckpointManager(root, interval=SaveInterval(steps=3, lead=1), retention=Retention(last=2)) as manager:
        assert manager.restore(state) is None
        for step in range(1, 100):
            state["w"] += step
            dist.all_reduce(torch.ones(1))
            state["step"] = step
            if rank == 1 and step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                manager.async_save(step, state, metrics={"loss": torch.tensor(1.0 / step)}).wait_staged()
                saved.append(step)
            if manager.preempted:
                break
    target: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
    with CheckpointManager(root) as manager:
        found = manager.restore(target)
    assert found is not None
    assert torch.equal(target["w"], state["w"])
    return {"saved": saved, "found": found.step, "step": target["step"], "end": step}


def test_torch(tmp_path: Path) -> None:
    first, second = (r.result for r in launch(2, train, (str(tmp_path),), timeout=50))
    assert first == second
    assert first["found"] == first["step"] == first["end"] <= 9
    assert first["saved"] == sorted({3, 6, first["end"]})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000006", f"step-{first['end']:010d}"]
