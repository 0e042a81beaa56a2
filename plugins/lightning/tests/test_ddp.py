"""CheckpointCallback with DDP on two gloo processes: told to end, killed, and equal bit for bit."""

import json
import signal
from pathlib import Path
from typing import Any

import lightning_job
import pytest

from hyper_ckpt.testing.launch import launch

JOB = str(Path(__file__).with_name("ddp_job.py"))


def told(out: Path, name: str) -> list[Any]:
    return [json.loads(Path(f"{out}-{name}-{rank}").read_text()) for rank in range(2)]


# Lightning's advice on speed, and what it uses of torch that torch is going to drop.
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")
@pytest.mark.timeout(150)  # two times two processes that import Lightning
def test_ddp_goes_on_where_it_was(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "out"
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    launch(2, JOB, [root, out, 1, 14], env=env, timeout=70, expect=dict.fromkeys(range(2), signal.SIGKILL))
    launch(2, JOB, [root, out, 2, 0], env=env, timeout=70)
    reference = told(out, "reference")
    assert reference[0] != reference[1], "each rank draws numbers of its own"
    (preempted, step), other = told(out, "told")
    assert [preempted, step] == other
    assert preempted
    assert 5 < step < 12, "the signal came in step 6 and to rank 1 only"
    resumed = told(out, "resumed")
    assert [digest for digest, _ in resumed] == reference
    assert {step for _, step in resumed} <= {step, 8, 12}
    with pytest.warns(UserWarning, match="2 ranks saved this checkpoint and 1 load it: of 'loaders', 'rng'"):
        alone, made = lightning_job.fit(root, seed=3, every=4, epochs=5)
    assert made.checkpoint_callback.restored.step == reference[0]["step"]
    assert alone["step"] == 5 * lightning_job.BATCHES, "one process goes on where two were"
