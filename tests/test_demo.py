"""`make demo`, with a smaller model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[1] / "examples" / "train_gpt" / "demo.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, str(DEMO), "--tiny", *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", env=env, timeout=200
    )


@pytest.mark.timeout(240)  # starts 15 processes that import torch: half a minute, on two cores that are free
def test_every_proof_holds(tmp_path: Path) -> None:
    demo = run("--keep", str(tmp_path / "kept"), "--timeout", "120")
    shown = re.sub(r"[\s│]+", " ", demo.stdout)  # lines are wrapped
    assert demo.returncode == 0, demo.stdout
    for line in (
        "exit codes [-9, -9, -9, -9]",
        "when it was saved, every tensor was that of the reference: 112 SHA-256 agree",
        "all 2 losses are the reference's, bit for bit",
        "All proofs hold",
        "112 tensors came back bit for bit on 4, 2 and 1 processes.",
    ):
        assert line in shown, demo.stdout
    assert shown.count("every parameter and optimizer tensor is what was saved: 112 SHA-256 agree") == 3
    assert max(map(len, demo.stdout.splitlines())) <= 80 + len(str(tmp_path))  # all but paths fits a terminal
    assert (tmp_path / "kept" / "checkpoint" / "manifest.json").exists()


def test_a_run_that_fails_is_shown() -> None:
    demo = run("--timeout", "0.2")
    assert demo.returncode == 1
    assert "FAILED" in demo.stdout
    assert "not done within 0.2 s" in demo.stdout
    assert all(f"rank {rank}" in demo.stdout for rank in range(4))
