"""verify: what it finds, how it says so, and that it ends as scripts expect."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

import hyper_ckpt
from hyper_ckpt.cli.verify import joined
from hyper_ckpt.engine.verify import Problem
from hyper_ckpt.manifest import MANIFEST_NAME

from ._world import LONG, process

Run = Callable[..., Result]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_good_one(run: Run, checkpoint: Path) -> None:
    result = run("verify", checkpoint)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"ok: {checkpoint}, ")
    facts = json.loads(run("verify", checkpoint, "--json").stdout)
    assert list(facts) == ["checkpoint", "state", "ok", "seconds", "bytes_checked", "problems"]
    assert (facts["state"], facts["ok"], facts["problems"]) == ("ok", True, [])
    assert facts["bytes_checked"] == hyper_ckpt.verify(checkpoint).bytes_checked


def test_a_flipped_bit(run: Run, checkpoint: Path) -> None:
    chunk = hyper_ckpt.read_metadata(checkpoint).storage_data[f"model/{LONG}"][1][1]
    flip(checkpoint / chunk.relative_path, chunk.offset + 5)
    result = run("verify", checkpoint)
    assert result.exit_code == 1
    file, what, place, verdict = result.stdout.splitlines()
    assert file == chunk.relative_path
    assert what == "  the bytes differ from what was saved"
    assert place == f"    bytes {chunk.offset:,} to {chunk.offset + chunk.length:,} of model/{LONG}"
    assert verdict.startswith(f"damaged, 1 problem: {checkpoint}")
    again = run("verify", checkpoint, "--json")
    (problem,) = json.loads(again.stdout)["problems"]
    assert again.exit_code == 1
    assert (problem["file"], problem["name"]) == (chunk.relative_path, f"model/{LONG}")
    assert (problem["start"], problem["stop"]) == (chunk.offset, chunk.offset + chunk.length)


def test_a_missing_file(run: Run, checkpoint: Path) -> None:
    path = next(checkpoint.glob("rank-00003-*"))
    path.unlink()
    result = run("verify", checkpoint)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{path.name}\n")
    assert "damaged, 1 problem" in result.stdout  # not one more for each of its blocks


@pytest.mark.parametrize("cut", [0, 10, -1])
def test_a_damaged_manifest(run: Run, checkpoint: Path, cut: int) -> None:
    path = checkpoint / MANIFEST_NAME
    path.write_bytes(path.read_bytes()[:cut])
    result = run("verify", checkpoint, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["state"] == "damaged"
    assert run("show", checkpoint).exit_code == 1


def test_an_unfinished_save(run: Run, checkpoint: Path) -> None:
    (checkpoint / MANIFEST_NAME).unlink()
    result = run("verify", checkpoint)
    assert result.exit_code == 1
    assert "incomplete, 1 problem" in result.stdout
    assert run("show", checkpoint).exit_code == 3


def test_it_was_replaced_meanwhile(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyper_ckpt.engine.verify import Verifier, VerifyReport

    def replaced(self: Verifier) -> VerifyReport:
        hyper_ckpt.save({"w": np.zeros(3)}, checkpoint, overwrite=True, durable=False)
        return real(self)

    real = Verifier.run
    monkeypatch.setattr(Verifier, "run", replaced)
    result = run("verify", checkpoint)
    assert result.exit_code == 4
    assert "was replaced while it was checked" in result.stderr


def test_adjacent_blocks_are_one_problem() -> None:
    blocks = [Problem("f", "w", a, a + 8, "differs") for a in (16, 8, 32)]
    other = [Problem("f", "v", 24, 32, "differs"), Problem("e", "", 0, 0, "gone"), Problem("e", "", 0, 0, "gone")]
    assert [(p.file, p.name, p.start, p.stop) for p in joined([*blocks, *other])] == [
        ("e", "", 0, 0),
        ("e", "", 0, 0),
        ("f", "w", 8, 24),
        ("f", "v", 24, 32),
        ("f", "w", 32, 40),
    ]


def test_lines_fit_80_columns(checkpoint: Path) -> None:
    for path in checkpoint.glob("rank-*"):
        path.write_bytes(path.read_bytes()[:-1])
    lines = process("verify", checkpoint).stdout.splitlines()
    assert max(len(line) for line in lines if str(checkpoint) not in line and LONG not in line) <= 80


def test_progress_is_drawn_on_a_terminal_only(checkpoint: Path) -> None:
    assert process("verify", checkpoint).stderr == ""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hyper_ckpt.cli", "verify", str(checkpoint)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=50, check=False)
    os.close(theirs)
    drawn = os.read(ours, 1 << 16)
    os.close(ours)
    assert done.returncode == 0
    assert b"verifying" in drawn
    assert done.stdout.startswith(b"ok: ")
