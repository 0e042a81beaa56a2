"""ls: which checkpoints are there, in which order, in what state."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

import hyper_ckpt
from hyper_ckpt.manifest import MANIFEST_NAME
from hyper_ckpt.receipt import ZERO_DIGEST, seal
from hyper_ckpt.storage.memory_store import MemoryStore

from ._world import process

Run = Callable[..., Result]


def save(where: object, at: float = 0) -> None:
    """Saves something small, as if at another time."""
    hyper_ckpt.save({"w": np.zeros(4, np.float32)}, str(where), durable=False)
    if at:
        path = Path(str(where)) / MANIFEST_NAME
        record = json.loads(path.read_bytes())
        record |= {"created": at, "digest": ZERO_DIGEST}
        path.write_bytes(seal(json.dumps(record, separators=(",", ":")).encode())[0])


def states(run: Run, root: object) -> dict[str, str]:
    result = run("ls", root, "--json")
    return {entry["name"]: entry["state"] for entry in json.loads(result.stdout)["checkpoints"]}


def test_a_table(run: Run, checkpoint: Path) -> None:
    result = run("ls", checkpoint.parent)
    assert result.exit_code == 0
    header, line = result.stdout.splitlines()
    assert header.split() == ["CHECKPOINT", "AGE", "SIZE", "RANKS", "TENSORS", "STATE"]
    name, _, _, size, unit, ranks, tensors, state = line.split()
    nbytes = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    assert (name, unit, ranks, tensors, state) == ("step-7", "KiB", "4", "4", "complete")
    assert float(size) == pytest.approx(nbytes / 1024, abs=0.06)


def test_order(run: Run, tmp_path: Path) -> None:
    for at, name in enumerate(["step-9", "final", "step-10", "best", "step-100", "step-2"], 1000):
        save(tmp_path / name, at)
    # Steps by number even where a lower one is newer; groups by their newest.
    assert list(states(run, tmp_path)) == ["final", "best", "step-2", "step-9", "step-10", "step-100"]


def test_states(run: Run, checkpoint: Path) -> None:
    root = checkpoint.parent
    for name in ("cut", "gone", "newer", "step-8", "step-9"):
        shutil.copytree(checkpoint, root / name)
    data = (checkpoint / MANIFEST_NAME).read_bytes()
    (root / "cut" / MANIFEST_NAME).write_bytes(data[:-5])
    next((root / "gone").glob("rank-00002-*")).unlink()
    digest = json.loads(data)["digest"].encode()
    newer = data.replace(b'"version":1', b'"version":9', 1).replace(digest, ZERO_DIGEST.encode(), 1)
    (root / "newer" / MANIFEST_NAME).write_bytes(seal(newer)[0])
    (root / "step-8" / MANIFEST_NAME).unlink()
    for path in (root / "step-9").iterdir():
        path.unlink() if path.is_file() else None  # receipts stay
    (root / "empty").mkdir()
    (root / "other").mkdir()
    (root / "other" / MANIFEST_NAME).write_text('{"name": "a web page"}')
    assert states(run, root) == {
        "cut": "damaged",
        "gone": "damaged",
        "newer": "newer",
        "step-7": "complete",
        "step-8": "incomplete",
        "step-9": "incomplete",
    }
    shown = run("ls", root)
    assert shown.exit_code == 0
    assert "gone: missing: rank-00002-" in shown.stdout
    assert max(len(line) for line in shown.stdout.splitlines() if str(root) not in line) <= 80


def test_the_root_itself(run: Run, checkpoint: Path) -> None:
    assert states(run, checkpoint) == {".": "complete"}


def test_the_current_directory(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    assert "step-7" in run("ls").stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_listed(run: Run, checkpoint: Path) -> None:
    locked = checkpoint.parent / "locked"
    locked.mkdir(mode=0)
    assert states(run, checkpoint.parent) == {"locked": "unreadable", "step-7": "complete"}


def test_nothing_there(run: Run, tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "absent", "memory://nothing"):
        result = run("ls", root)
        assert (result.exit_code, result.stdout) == (3, "")
        assert "no checkpoint in" in result.stderr
        assert json.loads(run("ls", root, "--json").stdout)["checkpoints"] == []


def test_urls(run: Run) -> None:
    try:
        save("memory://ls/run/step-10")
        save("memory://ls/run/step-9")
        MemoryStore("memory://ls/run/step-9").delete(MANIFEST_NAME)
        assert states(run, "memory://ls/run") == {"step-9": "incomplete", "step-10": "complete"}
        assert states(run, "memory://ls/run/step-10") == {".": "complete"}
    finally:
        MemoryStore.drop_bucket("ls")


def test_long_names_fit_80_columns(tmp_path: Path) -> None:
    name = "run-" + "x" * 100 + "-step-1000"
    save(tmp_path / name)
    done = process("ls", tmp_path)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "-step-1000 " in done.stdout
    assert json.loads(process("ls", tmp_path, "--json").stdout)["checkpoints"][0]["name"] == name
