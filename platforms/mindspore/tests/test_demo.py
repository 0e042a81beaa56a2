"""`make demo-mindspore`, with fewer steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_mindspore"
TENSORS = "23 tensors of network and optimizer, every SHA-256 is the reference's"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "demo.py"), "--short", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        timeout=200,
    )


@pytest.mark.timeout(240)  # starts seven processes that import MindSpore: half a minute, on two cores that are free
def test_every_proof_holds(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    demo = run("--keep", str(tmp_path / "kept"), "--timeout", "100")
    assert demo.returncode == 0, demo.stdout
    for line in (
        "exit codes [-9, -9]",
        f"✓ rank 0: {TENSORS}",
        f"✓ rank 1: {TENSORS}",
        "model/embed.weight                         ← train_network/embed.embedding_table",
        "optimizer/state/norm.bias/exp_avg          ← train_network/adam_m.norm.beta",
        "weights and moments: 21 tensors, 2,469,888 bytes, all equal",
        "saved by PyTorch and loaded by MindSpore again: all equal",
        "All proofs hold.",
    ):
        assert line in demo.stdout, demo.stdout
    assert (tmp_path / "kept" / "run-0-0" / "step-0000000100" / "manifest.json").exists()


def test_a_run_that_fails_is_shown() -> None:
    demo = run("--timeout", "0.2")
    assert demo.returncode == 1
    assert "FAILED: the job 'reference': not done within 0.2 s" in demo.stdout
    assert all(f"--- rank {rank} ---" in demo.stdout for rank in range(2))


def test_pytorch_wants_every_parameter(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import mindspore as ms
    import numpy as np

    import hyper_ckpt

    state = {"train_network": {"mix.bias": ms.Tensor(np.ones(256, np.float32))}}
    hyper_ckpt.save(state, tmp_path / "poor", no_dist=True)
    command = [sys.executable, str(EXAMPLE / "to_torch.py"), str(tmp_path / "poor")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50)
    assert ended.returncode == 1
    assert "not true: all is found" in ended.stdout
