"""CheckpointCallback with DDP on two gloo processes: told to end, killed, and equal bit for bit."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from hyper_ckpt.testing.launch import launch

JOB = str(Path(__file__).with_name("ddp_job.py"))


def told(out: Path, name: str) -> list[Any]:
    return [json.loads(Path(f"{out}-{name}-{rank}").read_text()) for rank in range(2)]


@pytest.mark.timeout(150)  # two times two processes that import transformers
def test_ddp_goes_on_where_it_was(tmp_path: Path) -> None:
    root, out = tmp_path / "run", tmp_path / "out"
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    launch(2, JOB, [root, out, 1, 13], env=env, timeout=70, expect=dict.fromkeys(range(2), signal.SIGKILL))
    launch(2, JOB, [root, out, 2, 0], env=env, timeout=70)
    reference = told(out, "reference")
    assert reference[0]["drawn"] != reference[1]["drawn"], "each rank draws numbers of its own"
    assert told(out, "told") == [True, True]
    resumed = told(out, "resumed")
    assert [step for _, step in resumed] == [8, 8]
    assert [digest for digest, _ in resumed] == reference
    steps = sorted(int(path.parent.name[len("step-") :]) for path in root.glob("step-*/manifest.json"))
    assert 3 < steps[0] < 8, "the signal came in step 4 and to rank 1 only"
    assert steps[1:] == [8, 16, 18]
