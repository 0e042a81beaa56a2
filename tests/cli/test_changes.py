"""clean, rm, cp, and what ls shows of a run."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

import hyper_ckpt
from hyper_ckpt import CheckpointManager, NumpyPlatform, SaveOptions
from hyper_ckpt.cli import changes
from hyper_ckpt.errors import StoreError
from hyper_ckpt.manager import copying
from hyper_ckpt.manifest import MANIFEST_NAME
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.faults import FaultyStore

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _bucket() -> Iterator[None]:
    yield
    MemoryStore.drop_bucket("cp")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of three steps: the first pinned, the last with metrics."""
    with CheckpointManager(tmp_path / "run", on_sigterm=False) as m:
        m.save(5, {"w": np.ones(9)}, pinned=True)
        m.save(10, {"w": np.ones(9)})
        m.save(20, {"w": np.ones(9)}, metrics={"loss": 0.123456789, "acc": float("inf")})
    return tmp_path / "run"


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def age(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))


def test_ls_shows_what_a_run_notes(run: Run, root: Path) -> None:
    lines = run("ls", root).stdout.splitlines()
    assert lines[0].split()[-1] == "NOTES"
    assert [line.split("complete")[1].strip() for line in lines[1:]] == ["pinned", "", "loss=0.123457, acc=nan"]
    assert max(map(len, lines)) <= 80
    found = json.loads(run("ls", root, "--json").stdout)["checkpoints"]
    assert [(e["pinned"], e["metrics"]) for e in found] == [
        (True, {}),
        (False, {}),
        (False, {"loss": 0.123456789, "acc": None}),
    ]


def test_clean(run: Run, root: Path, checkpoint: Path) -> None:
    dead, young = root / "step-0000000030", root / "step-0000000040"
    for folder in (dead, young):
        shutil.copytree(checkpoint, folder)
        (folder / MANIFEST_NAME).unlink()
    (dead / "mine.txt").write_text("mine")
    stray = root / "step-0000000010" / "rank-00000-0123456789abcdef.safetensors"
    stray.write_bytes(b"xyz")
    age(root)
    age(young)
    next(young.glob("rank-*")).touch()
    before = names(root)
    shown = run("clean", root, "--dry-run")
    assert shown.exit_code == 0
    assert "would remove 9 files" in shown.stdout
    assert names(root) == before
    done = run("clean", root)
    assert done.exit_code == 0
    assert done.stdout == shown.stdout.replace("would remove", "removed")
    assert f"step-0000000010/{stray.name}  3 B" in done.stdout
    gone = set(before) - set(names(root))
    assert gone == {n for n in before if n.startswith("step-0000000030/") and "mine" not in n} | {
        f"step-0000000010/{stray.name}"
    }
    assert "removed 8 files" in run("clean", root, "--older-than", "0s").stdout
    assert not young.exists()
    assert run("clean", root, "--older-than", "0.5h").stdout == "removed 0 files, 0 B\n"
    assert all(hyper_ckpt.verify(root / f"step-{n:010d}").ok for n in (5, 10, 20))


def test_clean_says_what_it_cannot(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: LocalStore, name: str) -> None:
        raise StoreError(f"removing {name} failed: read-only")

    (root / "step-0000000010" / MANIFEST_NAME).unlink()
    monkeypatch.setattr(LocalStore, "delete", refuse)
    result = run("clean", root, "--older-than", "0s")
    assert result.exit_code == 4
    assert "removed 0 files" in result.stdout
    assert "read-only" in result.stderr


@pytest.mark.parametrize("wrong", ["1", "h", "-1h", "1w", "nan"])
def test_ages_that_are_none(run: Run, tmp_path: Path, wrong: str) -> None:
    result = run("clean", tmp_path, "--older-than", wrong)
    assert result.exit_code == 2
    assert "write 90s, 30m, 24h or 7d" in result.stderr


def test_clean_where_nothing_is(run: Run, tmp_path: Path) -> None:
    for where in (tmp_path / "absent", "memory://cp/absent"):
        result = run("clean", where)
        assert (result.exit_code, result.stdout) == (3, "")


def test_rm(run: Run, root: Path) -> None:
    two, pinned = root / "step-0000000010", root / "step-0000000005"
    result = run("rm", two)
    assert result.exit_code == 2
    assert "pass --yes" in result.stderr
    result = run("rm", "--yes", two, pinned)
    assert result.exit_code == 4
    assert "is pinned" in result.stderr
    assert two.exists(), "if one cannot go, all stay"
    (two / "mine.txt").write_text("mine")
    result = run("rm", "--yes", two, root / "step-0000000020")
    assert result.exit_code == 0
    assert result.stdout.count("removed") == 2
    assert [n for n in names(root) if not n.startswith("step-0000000005/")] == ["step-0000000010/mine.txt"]
    assert run("rm", "--yes", "--force", pinned).exit_code == 0
    assert names(root) == ["step-0000000010/mine.txt"]


def test_rm_of_a_run(run: Run, root: Path) -> None:
    before = names(root)
    for options in (["--yes"], ["--yes", "--force"]):
        result = run("rm", *options, root)
        assert (result.exit_code, result.stdout) == (3, "")
        assert "holds 3 checkpoints, as the folder of a run" in result.stderr
        assert f"such as {root}/step-0000000005; hyper-ckpt ls {root} lists them" in result.stderr
    assert names(root) == before


def test_rm_asks(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(lines: list[str]) -> None:
        asked.extend(lines)

    monkeypatch.setattr(changes, "_ask", ask)
    assert run("rm", root / "step-0000000010").exit_code == 0
    assert len(asked) == 1
    assert "step-0000000010  complete, " in asked[0]


def test_rm_of_other_states(run: Run, root: Path, checkpoint: Path) -> None:
    dead, damaged = root / "step-0000000010", root / "step-0000000020"
    (dead / MANIFEST_NAME).unlink()
    (damaged / MANIFEST_NAME).write_bytes((damaged / MANIFEST_NAME).read_bytes()[:-9])
    result = run("rm", "--yes", dead)
    assert result.exit_code == 4
    assert "may still be being saved" in result.stderr
    assert run("rm", "--yes", "--force", dead).exit_code == 0
    assert run("rm", "--yes", damaged).exit_code == 0
    assert {n.partition("/")[0] for n in names(root)} == {"step-0000000005"}
    (root / "other").mkdir()
    (root / "other" / MANIFEST_NAME).write_text('{"name": "a web page"}')
    for nothing in (root / "other", root / "absent", "memory://cp/absent"):
        assert run("rm", "--yes", "--force", nothing).exit_code == 3
    assert (root / "other" / MANIFEST_NAME).exists()


def test_cp(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    result = run("cp", checkpoint, "memory://cp/a/step-7", "--threads", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("copied ")
    assert result.stdout.rstrip().endswith("all of it verified")
    assert run("cp", "memory://cp/a/step-7", tmp_path / "back").exit_code == 0
    assert hyper_ckpt.verify(tmp_path / "back").ok
    assert names(tmp_path / "back") == names(checkpoint)
    for name in names(checkpoint):
        assert (tmp_path / "back" / name).read_bytes() == (checkpoint / name).read_bytes()


def test_cp_keeps_what_a_run_notes(run: Run, root: Path, tmp_path: Path) -> None:
    for step in (5, 20):
        assert run("cp", root / f"step-{step:010d}", tmp_path / "other" / f"step-{step}").exit_code == 0
    found = CheckpointManager(tmp_path / "other", on_sigterm=False).steps()
    assert [(i.step, i.pinned, i.metrics) for i in found] == [
        (5, True, {}),
        (20, False, {"loss": 0.123456789, "acc": None}),
    ]


def test_cp_of_ranks_that_did_not_talk(run: Run, tmp_path: Path) -> None:
    for rank in range(2):
        hyper_ckpt.save(
            {"w": hyper_ckpt.ShardedTensor([(np.full(3, rank), (3 * rank,))], (6,))},
            tmp_path / "alone",
            platform=NumpyPlatform(rank=rank, world_size=2),
            use_collectives=False,
            options=SaveOptions(save_token="t"),
        )
    assert run("cp", tmp_path / "alone", tmp_path / "copy").exit_code == 0
    assert (tmp_path / "copy" / MANIFEST_NAME).exists()
    assert hyper_ckpt.verify(tmp_path / "copy").ok
    assert hyper_ckpt.read(tmp_path / "copy")["w"].tolist() == [0, 0, 0, 1, 1, 1]


def test_cp_refuses_what_is_there(run: Run, checkpoint: Path, root: Path) -> None:
    result = run("cp", checkpoint, root / "step-0000000010")
    assert result.exit_code == 4
    assert "holds a checkpoint already: copy to another path, or remove it first with hyper-ckpt rm /" in result.stderr
    assert "overwrite" not in result.stderr
    (root / "step-0000000010" / MANIFEST_NAME).unlink()
    result = run("cp", checkpoint, root / "step-0000000010")
    assert result.exit_code == 4
    assert "did not finish" in result.stderr
    assert run("cp", root / "absent", root / "new").exit_code == 3


@pytest.mark.parametrize("how", ["data", "header", "receipt", "missing", "manifest"])
def test_cp_copies_no_damage(run: Run, checkpoint: Path, tmp_path: Path, how: str) -> None:
    file = {
        "receipt": next((checkpoint / "receipts").iterdir()),
        "manifest": checkpoint / MANIFEST_NAME,
    }.get(how, next(checkpoint.glob("rank-*")))
    raw = bytearray(file.read_bytes())
    raw[20 if how == "header" else -2] ^= 1
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(raw)
    result = run("cp", checkpoint, tmp_path / "copy")
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("kind", ["create", "write_at", "close", "publish"])
def test_cp_that_fails_leaves_nothing(run: Run, checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = copying.registry
    made: list[Any] = []

    class Faulty:
        def store(self, url: str) -> Any:
            inner = registry().store(url)
            if not url.startswith("memory"):
                return inner
            made.append(FaultyStore(inner, lambda op: StoreError("no space") if op.kind == kind else None))
            return made[-1]

    monkeypatch.setattr(copying, "registry", Faulty)
    result = run("cp", checkpoint, "memory://cp/a")
    assert result.exit_code == 4
    assert "no space" in result.stderr
    assert made[0].fired
    assert MemoryStore("memory://cp/a").list() == []
