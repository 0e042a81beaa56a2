"""A disk that is full: what a failed save made it removes, directories included; what a killed one left is shown."""

import ctypes
import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_ckpt import CheckpointManager, NumpyPlatform, SaveOptions, save
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.errors import StoreError
from hyper_ckpt.manager.listing import checkpoints
from hyper_ckpt.manager.removal import clean
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.syscalls import store_error
from hyper_ckpt.testing.faults import CountingStore, FaultyStore, Operation

from ._ranks import all_fail, caught
from ._states import part
from ._stores import through

MS_PRIVATE_REC, CLONE_NEWNS = 1 << 18 | 1 << 14, 0x20000
WRITES = {"create", "write_at", "close", "publish", "sync"}


def no_space(operation: Operation) -> Exception | None:
    if operation.kind not in WRITES:
        return None
    return store_error("writing", operation.name, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def full_at_close(inner: ByteStore) -> ByteStore:
    return FaultyStore(inner, lambda op: no_space(op) if op.kind == "close" else None)


@pytest.mark.parametrize("options", [{}, {"use_collectives": False, "options": SaveOptions(save_token="a")}])
def test_a_save_that_fails_at_any_write_leaves_no_directory(tmp_path: Path, options: dict[str, Any]) -> None:
    counted: list[CountingStore] = []

    def count(inner: Any) -> CountingStore:
        counted.append(CountingStore(inner))
        return counted[-1]

    save(part(1), through(tmp_path / "counted", count), platform=NumpyPlatform(), **options)
    numbers = [op.number for op in counted[0].log if op.kind in WRITES]
    assert len(numbers) > 5
    for number in numbers:
        root = tmp_path / f"at {number}"
        url = through(
            root / "run" / "c",
            lambda s, number=number: FaultyStore(
                s, lambda op: no_space(op) if op.number >= number and op.kind in WRITES else None
            ),
        )
        with pytest.raises(StoreError, match="No space"):
            save(part(1), url, platform=NumpyPlatform(), **options)
        assert not root.exists(), f"failed at {counted[0].log[number - 1]}"


@pytest.mark.parametrize("on", [0, 2])
def test_of_many_ranks_the_last_removes_the_directories(tmp_path: Path, on: int) -> None:
    path = tmp_path / "run" / "c"

    def run(platform: Platform) -> None:
        rank = platform.ranks.rank
        url = through(
            path,
            (lambda s: FaultyStore(s, lambda op: no_space(op) if op.kind == "close" else None))
            if rank == on
            else lambda s: s,
        )
        save(part(1, rank, 3), url, platform=platform)

    all_fail(3, run, tmp_path / "scratch")
    assert not path.parent.exists()


def test_directories_that_were_there_stay(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()
    with pytest.raises(StoreError):
        save(
            part(1),
            through(path, lambda s: FaultyStore(s, lambda op: no_space(op) if op.kind == "close" else None)),
            no_dist=True,
        )
    assert list(path.iterdir()) == []


SCRIPT = """
    import os, sys
    import numpy as np
    import hyper_ckpt

    root = sys.argv[1]
    fill = open(f"{root}/fill", "wb")
    fill.write(bytes(os.statvfs(root).f_bavail * os.statvfs(root).f_frsize - int(sys.argv[2])))
    fill.close()
    state = {"x": np.ones(100_000)}
    manager = hyper_ckpt.CheckpointManager(f"{root}/run", on_sigterm=False)
    calls = [
        lambda: hyper_ckpt.save(state, f"{root}/a/b"),
        lambda: hyper_ckpt.async_save(state, f"{root}/c").result(),
        lambda: manager.save(1, state),
        lambda: manager.save(2, state, metrics={"loss": 1.0}),
        lambda: manager.async_save(3, state, metrics={"loss": 1.0}, pinned=True).result(),
    ]
    for call in calls:
        try:
            call()
            print("saved")
        except hyper_ckpt.errors.StoreError as error:
            assert "No space" in str(error) or "space" in str(error), error
    hyper_ckpt.api.common.in_flight(hyper_ckpt.registry.registry().platform("numpy")).wait_room(1, 30)
    print(sorted(str(each) for each, _, _ in os.walk(root) if each not in (root, f"{root}/run")))
    os.unlink(f"{root}/fill")
    manager.save(4, state)
    assert manager.latest() == 4
"""


@pytest.mark.parametrize("room", [0, 4096, 100_000])
def test_a_real_disk_that_is_full(tmp_path: Path, room: int) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may mount")

    def mount() -> None:
        libc = ctypes.CDLL(None)
        if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_PRIVATE_REC, None):
            os._exit(77)
        if libc.mount(b"tmpfs", os.fsencode(tmp_path), b"tmpfs", 0, b"size=4m"):
            os._exit(77)

    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(room)]
    done = subprocess.run(command, preexec_fn=mount, capture_output=True, text=True, timeout=50)
    if done.returncode == 77:
        pytest.skip("no mount namespace can be made here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]"], done.stdout


# ------------------------------------------------------------------ what was left is shown, and goes


def test_empty_folders_of_steps_are_listed_and_cleaned(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with CheckpointManager(run, on_sigterm=False, platform=NumpyPlatform()) as manager:
        manager.save(1, {"x": np.ones(3)})
        for name in ("step-0000000002", "step-0000000003/receipts", "step-0000000004", "logs"):
            (run / name).mkdir(parents=True)
        (run / "step-0000000004" / "hyper-ckpt-step.json").write_text('{"format":"hyper-ckpt-step","version":1}')
        (run / "step-0000000005").mkdir()
        (run / "step-0000000005" / "of a user").write_text("")
        assert [(s.step, s.state) for s in manager.steps()] == [(1, "complete")] + [
            (n, "incomplete") for n in (2, 3, 4)
        ]
        assert all("nothing was saved here" in (s.problem or "") for s in manager.steps()[1:])
        assert manager.latest() == 1
        restored = manager.restore({"x": np.zeros(3)})
        assert restored is not None
        assert restored.step == 1
    store = registry().store(str(run))
    assert {e.name: e.state for e in checkpoints(store)}.keys() == {f"step-{n:010d}" for n in (1, 2, 3, 4)}
    assert clean(store, 3600)[0] == [], "a save may be at work"
    wanted = {"step-0000000002", "step-0000000003", "step-0000000004/hyper-ckpt-step.json"}
    assert {each.name for each in clean(store, -1, dry_run=True)[0]} == wanted
    assert (run / "step-0000000002").exists()
    assert {each.name for each in clean(store, -1)[0]} == wanted
    assert {each.name for each in run.iterdir()} == {"step-0000000001", "step-0000000005", "logs"}


def test_an_operation_that_fails_takes_its_directories_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "a" / "b")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hyper_ckpt.storage.syscalls.preallocate", full)
    monkeypatch.setattr("hyper_ckpt.storage.syscalls.write_all", full)
    for call in (lambda: store.create("c/d", 5), lambda: store.publish("c/d", b"x", "x", sync=False)):
        assert type(caught(call)) is StoreError
        assert list(tmp_path.iterdir()) == []
