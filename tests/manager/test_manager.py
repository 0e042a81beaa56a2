"""CheckpointManager in one process: what is saved, what stays, what is loaded; on disk and in memory."""

import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import CheckpointManager, NumpyPlatform, Retention, SaveInterval
from hyper_ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
)
from hyper_ckpt.manager.note import NOTE_NAME
from hyper_ckpt.manifest import MANIFEST_NAME
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.memory_store import MemoryStore

from ._runs import complete, fill, manager, state


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name = f"manager-{time.monotonic_ns()}"
    yield str(tmp_path / "run") if request.param == "disk" else f"memory://{name}/run"
    MemoryStore.drop_bucket(name)


def test_a_run(root: str) -> None:
    with manager(root, interval=SaveInterval(steps=10), retention=Retention(last=2, every=50, best=1)) as m:
        target = state()
        assert m.restore(target) is None
        assert (m.latest(), m.steps(), target["step"]) == (None, [], 0)
        for step in range(1, 101):
            if m.should_save(step):
                m.async_save(step, state(step), metrics={"loss": abs(step - 31)}, user_metadata="mine")
    assert complete(m) == [30, 50, 90, 100]
    info = m.steps()[0]
    assert (info.metrics, info.pinned, info.problem) == ({"loss": 1.0}, False, None)
    assert info.nbytes > 8000
    assert 0 <= info.age < 600
    assert hyper_ckpt.read_metadata(info.path).user_metadata == "mine"
    with manager(root) as again:
        found = again.restore(target)
        assert found is not None
        assert (found.step, target["step"], found.skipped) == (100, 100, ())
        assert found.report.loaded == ("w",)
        found = again.restore(target, 30)
        assert found is not None
        assert (found.step, target["step"]) == (30, 30)
        with pytest.raises(CheckpointNotFoundError, match=r"step 40 in .*run; complete: 30, 50, 90, 100"):
            again.restore(target, 40)


def test_save_and_pins(root: str) -> None:
    m = fill(root, 10, retention=Retention(last=1))
    m.save(20, state(20), pinned=True)
    m.save(30, state(30))
    assert complete(m) == [20, 30]
    m.pin(30)
    m.save(40, state(40))
    m.unpin(20)
    m.save(50, state(50))
    assert complete(m) == [30, 50]
    m.save(30, state(31))
    assert [info.pinned for info in m.steps()] == [True, False], "saved anew, a step stays pinned"
    assert hyper_ckpt.read(m.steps()[0].path)["step"] == 31
    with pytest.raises(CheckpointError, match=r"pinned: unpin\(30\) first"):
        m.delete(30)
    m.unpin(30)
    m.delete(30)
    assert complete(m) == [50]
    for call in (m.delete, m.pin, m.unpin):
        with pytest.raises(CheckpointNotFoundError, match="complete: 50"):
            call(30)
    with pytest.raises(CheckpointExistsError):
        m.save(50, state(50), overwrite=False)
    assert registry().store(root).list("step-0000000030/") == []


def test_what_was_just_saved_stays_also_below_others(root: str) -> None:
    m = fill(root, 10, 20, 30, retention=Retention(last=1))
    m.save(15, state(15))
    assert complete(m) == [15, 30]


def test_odd_names_are_left_alone(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "notes.txt").write_text("mine")
    (tmp_path / "step-0000000004").write_text("a file")
    for name in ("step-", "step-x", "step--5", "step-٣", "best", "step-7.old", "step-1 "):
        shutil.copytree(tmp_path / "step-0000000001", tmp_path / name)
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / MANIFEST_NAME).write_text('{"name": "a web page"}')
    shutil.copytree(tmp_path / "step-0000000001", tmp_path / "step-6")  # as made by hand
    (tmp_path / "step-0000000002" / "own.txt").write_text("mine")
    before = {p.name for p in tmp_path.iterdir()}
    m = fill(tmp_path, 8, 9, retention=Retention(last=1), leftover_age=0.0)
    gone = {"step-0000000001", "step-6"}
    assert {p.name for p in tmp_path.iterdir()} == (before - gone) | {"step-0000000009"}
    assert [p.name for p in (tmp_path / "step-0000000002").iterdir()] == ["own.txt"]
    assert complete(m) == [9]
    found = m.restore(state())
    assert found is not None
    assert found.step == 9


def test_of_two_folders_for_a_step_the_one_that_save_writes_counts(tmp_path: Path) -> None:
    hyper_ckpt.save(state(1), tmp_path / "step-5")
    m = fill(tmp_path, 5)
    assert [(i.step, os.path.basename(i.path)) for i in m.steps()] == [(5, "step-0000000005")]
    found = m.restore(target := state())
    assert found is not None
    assert (found.step, target["step"]) == (5, 5)


def damage(folder: Path, how: str) -> None:
    data = next(folder.glob("*.safetensors"))
    if how == "flipped":
        raw = bytearray(data.read_bytes())
        raw[-1] ^= 1
        data.write_bytes(raw)
    elif how == "missing":
        data.unlink()
    elif how == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    elif how == "manifest":
        (folder / MANIFEST_NAME).write_bytes((folder / MANIFEST_NAME).read_bytes()[:-9])
    elif how == "incomplete":
        (folder / MANIFEST_NAME).unlink()


@pytest.mark.parametrize("how", ["flipped", "missing", "cut", "manifest"])
def test_restore_skips_a_damaged_one(tmp_path: Path, how: str) -> None:
    m = fill(tmp_path, 10, 20, 30)
    damage(tmp_path / "step-0000000030", how)
    target = state()
    with pytest.raises(CorruptCheckpointError):
        m.restore(target, skip_damaged=False)
    with pytest.raises(CorruptCheckpointError):
        m.restore(target, 30)
    assert target["step"] == 0
    assert not target["w"].any()
    with pytest.warns(UserWarning, match=r"step 20 of .* was loaded, since newer ones cannot be: step 30: .*step-0"):
        found = m.restore(target)
    assert found is not None
    assert (found.step, target["step"], target["w"][0]) == (20, 20, 20.0)
    assert [step for step, _ in found.skipped] == [30]
    m.save(30, state(30))
    again = m.restore(target)
    assert again is not None
    assert again.step == 30


def test_an_incomplete_one_is_not_even_mentioned(tmp_path: Path) -> None:
    m = fill(tmp_path, 10, 20)
    damage(tmp_path / "step-0000000020", "incomplete")
    found = m.restore(target := state())
    assert found is not None
    assert (found.step, found.skipped, target["step"], m.latest()) == (10, (), 10, 10)
    assert [info.state for info in m.steps()] == ["complete", "incomplete"]


def test_if_all_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    m = fill(tmp_path, 10, 20)
    for folder in tmp_path.iterdir():
        damage(folder, "flipped")
    with pytest.raises(CorruptCheckpointError, match=r"no checkpoint of .* can be loaded: step 20: .*step 10: "):
        m.restore(state())


def test_retention_counts_no_damaged_one(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    damage(tmp_path / "step-0000000020", "missing")
    m = fill(tmp_path, 30, retention=Retention(last=2))
    assert complete(m) == [10, 30]


@pytest.mark.parametrize("copy", [["cp", "-r"], ["cp", "-a"], ["rsync", "-r"]], ids=" ".join)
def test_a_copy_is_complete(tmp_path: Path, copy: list[str]) -> None:
    if shutil.which(copy[0]) is None:
        pytest.skip(f"{copy[0]} is not installed")
    m = fill(tmp_path / "run", 10)
    m.save(20, state(20), metrics={"loss": 2.0}, pinned=True)
    (tmp_path / "copy").mkdir()
    for folder in (tmp_path / "run").iterdir():
        assert os.spawnvp(os.P_WAIT, copy[0], [*copy, str(folder), f"{tmp_path}/copy/"]) == 0
    for path in (tmp_path / "copy").rglob("*"):
        os.utime(path, (1, 1))
    other = manager(tmp_path / "copy", retention=Retention(last=1, hours=1))
    assert [(i.step, i.state, i.pinned, i.metrics) for i in other.steps()] == [
        (10, "complete", False, {}),
        (20, "complete", True, {"loss": 2.0}),
    ]
    found = other.restore(target := state())
    assert found is not None
    assert (found.step, target["step"]) == (20, 20)
    other.save(30, state(30))
    assert complete(other) == [10, 20, 30], "as young as when it was saved"


def test_two_managers_on_one_root(root: str) -> None:
    one, two = (manager(root, retention=Retention(last=2)) for _ in range(2))
    for step in range(1, 9):
        (one, two)[step % 2].save(step, state(step))
    assert complete(one) == complete(two) == [7, 8]
    errors: list[BaseException] = []

    def work(m: CheckpointManager, first: int) -> None:
        try:
            for step in range(first, 60, 2):
                m.save(step, state(step), durable=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(m, 10 + i)) for i, m in enumerate((one, two))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert 59 in complete(one)
    assert all(hyper_ckpt.verify(info.path).ok for info in one.steps() if info.complete)


def test_nothing_goes_before_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    publish, delete = LocalStore.publish, LocalStore.delete

    def published(store: LocalStore, name: str, *args: Any, **options: Any) -> str:
        out = publish(store, name, *args, **options)
        events.append(f"publish {os.path.relpath(os.path.join(store.url, name), tmp_path)}")
        return out

    def deleted(store: LocalStore, name: str) -> None:
        delete(store, name)
        events.append(f"delete {os.path.relpath(os.path.join(store.url, name), tmp_path)}")

    monkeypatch.setattr(LocalStore, "publish", published)
    monkeypatch.setattr(LocalStore, "delete", deleted)
    with manager(tmp_path, retention=Retention(last=1)) as m:
        for step in (1, 2):
            m.async_save(step, state(step))
    new = events.index(f"publish step-0000000002/{MANIFEST_NAME}")
    gone = [i for i, event in enumerate(events) if event.startswith("delete step-0000000001/")]
    assert events[gone[0]] == f"delete step-0000000001/{MANIFEST_NAME}"
    assert len(gone) == 3
    assert new < gone[0]


def test_killed_while_removing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was removed so far: nothing counts as complete that is not."""
    delete = LocalStore.delete
    for survived in range(4):
        root = tmp_path / str(survived)
        m = fill(root, 1, 2)
        left = [survived]

        def dying(store: LocalStore, name: str, left: list[int] = left) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            delete(store, name)

        monkeypatch.setattr(LocalStore, "delete", dying)
        try:
            m.delete(1)
        except KeyboardInterrupt:
            assert survived < 3
        monkeypatch.setattr(LocalStore, "delete", delete)
        assert complete(m) == ([1, 2] if survived == 0 else [2])
        assert all(hyper_ckpt.verify(info.path).ok for info in m.steps() if info.complete)
        m.save(1, state(1))
        assert complete(m) == [1, 2]


def test_leftovers_of_dead_saves_go_with_the_first_save(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    for step in (1, 2):
        damage(tmp_path / f"step-000000000{step}", "incomplete")
    for path in (tmp_path / "step-0000000001").rglob("*"):
        os.utime(path, (1, 1))
    m = fill(tmp_path, 4, leftover_age=3600)
    assert [(info.step, info.state) for info in m.steps()] == [(2, "incomplete"), (3, "complete"), (4, "complete")]
    assert not (tmp_path / "step-0000000001").exists()


def test_what_cannot_be_removed_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = LocalStore.delete

    def refuse(store: LocalStore, name: str) -> None:
        raise StoreError(f"removing {name} failed: read-only")

    m = fill(tmp_path, 1, retention=Retention(last=1))
    monkeypatch.setattr(LocalStore, "delete", refuse)
    with pytest.warns(UserWarning, match="superseded could not be removed.*read-only"):
        m.save(2, state(2))
    m.async_save(3, state(3)).result()
    with pytest.warns(UserWarning, match="could not be removed"):
        m.close()
    monkeypatch.setattr(LocalStore, "delete", delete)
    assert complete(fill(tmp_path, 4, retention=Retention(last=1))) == [4]


def test_a_damaged_note_keeps_its_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "step-0000000001" / NOTE_NAME).write_bytes(b"{")
    assert complete(fill(tmp_path, 2, 3, retention=Retention(last=1))) == [1, 3]


def test_metrics(root: str) -> None:
    m = manager(root, retention=Retention(best=1, metric="acc", mode="max"))
    m.save(1, state(1), metrics={"acc": np.float32(0.5), "loss": float("nan")})
    assert m.steps()[0].metrics == {"acc": 0.5, "loss": None}
    with pytest.raises(ValueError, match="chosen by 'acc', and the metrics of step 2 are 'loss'"):
        m.save(2, state(2), metrics={"loss": 1})
    with pytest.raises(ValueError, match="metrics are numbers, but 'acc' is a str"):
        m.save(2, state(2), metrics={"acc": "high"})
    for wrong in (-1, 10**18):
        with pytest.raises(ValueError, match="from 0 on"):
            m.save(wrong, state())
    with pytest.raises(TypeError):
        m.save(1.5, state())  # type: ignore[arg-type]
    assert complete(m) == [1]
    m.save(np.int64(3), state(3))  # type: ignore[arg-type]
    assert complete(m) == [1, 3]


def test_the_best_by_a_metric_that_nobody_passes(root: str) -> None:
    m = fill(root, 1, retention=Retention(best=2, metric="val"))
    with pytest.warns(UserWarning, match="nothing is removed.*no checkpoint of .*run has 'val' among its metrics"):
        m.save(2, state(2))
    for step in (3, 4, 5):  # said once: warnings are errors here
        m.save(step, state(step), metrics={"val": float("nan")} if step == 4 else None)
    assert complete(m) == [1, 2, 3, 4, 5]
    for step in (6, 7, 8):
        m.save(step, state(step), metrics={"val": step})
    assert complete(m) == [6, 7, 8]
    m = manager(root, retention=Retention(best=1, metric="other"))
    m.async_save(9, state(9))
    with pytest.warns(UserWarning, match="no checkpoint of .* has 'other'"):
        m.close()
    assert complete(m) == [6, 7, 8, 9]


@pytest.mark.parametrize("how", ["whole", "damaged"])
def test_a_checkpoint_is_no_root(root: str, how: str) -> None:
    fill(root, 1)
    one = f"{root}/step-0000000001"
    if how == "damaged":
        registry().store(one).delete("receipts/" + registry().store(one).list("receipts/")[0].rpartition("/")[2])
    m = manager(one)
    calls: list[Callable[[], Any]] = [
        m.steps,
        m.latest,
        lambda: m.restore(state()),
        lambda: m.restore(state(), 1),
        lambda: m.save(2, state(2)),
        lambda: m.async_save(2, state(2)),
        lambda: m.pin(1),
    ]
    text = r"step-0000000001 .*this is a checkpoint: give the folder above it, .*/run,"
    for call in calls:
        with pytest.raises(ValueError, match=text):
            call()
    m.close()
    assert complete(manager(root)) == ([1] if how == "whole" else [])


def test_a_checkpoint_beside_the_steps_of_a_run(root: str) -> None:
    """Made before there was a manager: it disturbs no run that has steps."""
    fill(root, 1)
    hyper_ckpt.save(state(7), root, platform=NumpyPlatform())
    with manager(root) as m:
        found = m.restore(state())
        assert found is not None
        assert found.step == 1
        m.save(2, state(2))
        assert complete(m) == [1, 2]


def test_a_run_that_begins_says_so(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hyper_ckpt"):
        assert manager(root).restore(state()) is None
    assert [(r.name, r.levelname) for r in caplog.records] == [("hyper_ckpt", "INFO")]
    assert caplog.messages[0].endswith("run: the run begins at the beginning")
    assert caplog.messages[0].startswith("no checkpoint in ")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"interval": 5}, r"interval must be SaveInterval\(steps=5\), not 5"),
        ({"interval": "10m"}, r"interval must be SaveInterval\(steps=\.\.\.\), not '10m'"),
        ({"interval": Retention(last=3)}, r"interval must be SaveInterval\(steps=\.\.\.\), not Retention\(last=3"),
        ({"retention": 3}, r"retention must be Retention\(last=3\), not 3"),
        ({"retention": True}, r"retention must be Retention\(last=\.\.\.\), not True"),
        ({"leftover_age": "24h"}, "leftover_age must be a number, not '24h'"),
    ],
)
def test_arguments_of_another_type(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        manager(tmp_path, **options)


def test_calls_with_another_type(root: str) -> None:
    m: Any = manager(root, retention=Retention(best=1, metric="val"))
    for call in (m.save, m.async_save):
        with pytest.raises(TypeError, match="step must be an integer from 0 on, not '11'"):
            call("11", state())
        with pytest.raises(TypeError, match="step must be an integer from 0 on, not True"):
            call(True, state())
        with pytest.raises(TypeError, match=r'metrics must be \{"val": 3\.0\}, not 3\.0'):
            call(11, state(), metrics=3.0)
    with pytest.raises(TypeError, match="step must be an integer"):
        m.restore(state(), "11")
    for call in (m.should_save, m.pin, m.unpin, m.delete):
        with pytest.raises(TypeError, match=r"step must be an integer from 0 on, not 1\.5"):
            call(1.5)
    assert m.steps() == []
    m.save(11, state(11))
    assert complete(m) == [11]


def test_nothing_warns_by_itself(root: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with manager(root, retention=Retention(last=1)) as m:
            for step in range(5):
                m.async_save(step, state(step))
