"""Killed at every single store operation: the path holds the old checkpoint whole or the new one whole."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_ckpt import SaveOptions, save
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.errors import CheckpointNotFoundError
from hyper_ckpt.registry import registry
from hyper_ckpt.testing.faults import CountingStore, KillAt, Killed
from hyper_ckpt.testing.world import run_world

from ._states import assert_holds, assert_no_leftovers, files_in, part
from ._stores import through

OLD, NEW, NEXT = 1, 2, 3
CHILD = Path(__file__).with_name("crash_child.py")
WHENS = ["before", "inside", "after"]


def run_save(step: int, path: Path, store: ByteStore | None, world_size: int, **options: object) -> None:
    where = str(path) if store is None else through(path, lambda _: store)
    run_world(world_size, lambda p: save(part(step, p.ranks.rank, world_size), where, platform=p, **options))


def count_operations(tmp_path: Path, world_size: int, overwrite: bool) -> int:
    """How many operations on the store a save takes."""
    path = tmp_path / "counted"
    if overwrite:
        run_save(OLD, path, None, world_size)
    store = CountingStore(registry().store(str(path)))
    run_save(NEW, path, store, world_size, overwrite=True)
    return len(store.log)


def kill_at_each(cases: list[tuple[str, int, int, str]]) -> list[int]:
    """Really kills one process per case. Returns the signals."""
    env = {**os.environ, "PYTHONPATH": str(CHILD.parents[1])}
    done = subprocess.run(
        [sys.executable, str(CHILD)],
        input=json.dumps(cases),
        env=env,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def check_after_death(path: Path, overwrite: bool) -> str:
    """The path is whole, the next save works, and it takes the dead save's files away. Returns what was there."""
    try:
        found = {OLD: "old", NEW: "new"}[assert_holds(path, OLD, NEW)]
    except CheckpointNotFoundError:
        found = "none"
    assert found in (["old", "new"] if overwrite else ["none", "new"])
    save(part(NEXT), path, overwrite=True, no_dist=True, durable=False, options=SaveOptions(leftover_age=0))
    assert_holds(path, NEXT)
    assert_no_leftovers(path)
    return found


@pytest.mark.parametrize("overwrite", [False, True], ids=["new-path", "overwrite"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_at_every_operation(
    tmp_path: Path, world_size: int, overwrite: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    total = count_operations(tmp_path, world_size, overwrite)
    old = tmp_path / "old"
    if overwrite:
        run_save(OLD, old, None, world_size)
    cases = [(str(tmp_path / f"{when}-{k}"), world_size, k, when) for when in WHENS for k in range(1, total + 1)]
    for path, *_ in cases if overwrite else ():
        shutil.copytree(old, path)
    signals = kill_at_each(cases)
    assert signals == [signal.SIGKILL] * len(cases)
    found = [check_after_death(Path(path), overwrite) for path, *_ in cases]
    assert len(set(found)) == 2, "the kills reached from before the commit point to after it"
    with capsys.disabled():
        what = "an overwrite" if overwrite else "a new path"
        print(
            f"\n{what}, {world_size} rank(s): {total} store operations, {len(cases)} processes killed "
            f"(before, inside and after each): {', '.join(f'{found.count(f)} x {f}' for f in sorted(set(found)))}"
        )


def test_a_young_leftover_stays(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    killed = KillAt(registry().store(str(path)), 6, lambda: None)
    with pytest.raises(Killed):
        run_save(OLD, path, killed, 1)
    left = files_in(path)
    assert left, "the save had begun to write"
    save(part(NEW), path, no_dist=True)
    assert left < files_in(path), "another save may still be at work"
    save(part(NEXT), path, no_dist=True, overwrite=True, options=SaveOptions(leftover_age=0))
    assert_no_leftovers(path)
    assert_holds(path, NEXT)


def test_leftovers_of_others_and_of_unreadable_manifests_stay(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(part(OLD), path, no_dist=True)
    mine = files_in(path) - {"manifest.json"}
    (path / "manifest.json").write_bytes(b"damaged")
    (path / "notes.txt").write_text("not ours")
    (path / "rank-notes.safetensors").write_text("not ours")
    save(part(NEW), path, no_dist=True, overwrite=True, options=SaveOptions(leftover_age=0))
    assert_holds(path, NEW)
    assert mine <= files_in(path), "what a damaged manifest listed may be all that is left of a checkpoint"
    assert {"notes.txt", "rank-notes.safetensors"} <= files_in(path)
