"""The executor that is a process: the same files, its death an error, nothing left behind."""

import errno
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import NumpyPlatform, SaveOptions, async_save, read
from hyper_ckpt.api.common import shared_stage
from hyper_ckpt.contracts.events import Event, EventSpec
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.contracts.store import StoreSpec
from hyper_ckpt.errors import CheckpointError, StoreError
from hyper_ckpt.hookspecs import hookimpl
from hyper_ckpt.layout import Mesh, MeshLayout, Replicate, Shard
from hyper_ckpt.registry import registry
from hyper_ckpt.testing.meshed import distribute, meshed_platform
from hyper_ckpt.testing.world import run_world

OPTIONS = SaveOptions(executor="process")


def writer(platform: Platform) -> Any:
    return shared_stage(platform)._process


@pytest.fixture
def platform() -> Iterator[Platform]:
    found = NumpyPlatform()
    yield found
    if "shared stage" in found.kept:
        writer(found).close()


def state(value: float = 1.0) -> dict[str, Any]:
    big = np.full((300, 1000), value)
    return {
        "big": big,
        "columns": big[:, ::3],
        "half": np.full(7, value, ml_dtypes.bfloat16),
        "scalar": np.array(value),
        "empty": big[:0],
        "step": int(value),
        "text": "long " * 20_000,
        "mine": hyper_ckpt.PerRank([value]),
    }


def equal(found: dict[str, Any], value: float) -> bool:
    want = state(value)
    arrays = [k for k in want if isinstance(want[k], np.ndarray)]
    same = all(found[k].tobytes() == np.ascontiguousarray(want[k]).tobytes() for k in arrays)
    return same and (found["step"], found["text"], found["mine"].value) == (int(value), want["text"], [value])


def test_it_writes_the_same_bytes(tmp_path: Path, platform: Platform) -> None:
    for i in range(3):
        original = state(i)
        handle = async_save(original, tmp_path / str(i), platform=platform, options=OPTIONS)
        handle.wait_staged(30)
        original["big"].fill(99)
        handle.result(30)
        assert equal(read(tmp_path / str(i)), i)
    hyper_ckpt.save(state(2), tmp_path / "thread", platform=platform)
    one, other = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("2", "thread"))
    assert [f.read_bytes() for f in one] == [f.read_bytes() for f in other]


def test_one_process_serves_all_saves_and_knows_no_framework(tmp_path: Path, platform: Platform) -> None:
    pids = set()
    for i in range(3):
        async_save(state(), tmp_path / str(i), platform=platform, options=OPTIONS).result(30)
        pids.add(writer(platform).pid)
    (pid,) = pids
    assert pid != os.getpid()
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_job_that_never_began_goes_to_another_process(tmp_path: Path, platform: Platform) -> None:
    """The process is dead, or is killed while the job waits for it: stopped, it cannot have read any."""
    for number, stopped in enumerate([False, True, False]):
        async_save(state(), tmp_path / f"{number}-before", platform=platform, options=OPTIONS).result(30)
        pid = writer(platform).pid
        os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)
        handle = async_save(state(number), tmp_path / str(number), platform=platform, options=OPTIONS)
        if stopped:
            handle.wait_staged(30)
            os.kill(pid, signal.SIGKILL)
        handle.result(30)
        assert equal(read(tmp_path / str(number)), number)
        assert writer(platform).pid != pid


STUCK = """
import pathlib, threading
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.testing.faults import WrapperStore

class StuckStore(WrapperStore):
    def create(self, *args):
        pathlib.Path(self.inner.url + ".begun").touch()
        threading.Event().wait()

def open_store(url):
    return StuckStore(LocalStore(url.removeprefix("stuck://")))
"""


class Stuck:
    @hookimpl
    def hyper_ckpt_stores(self) -> list[StoreSpec]:
        return [StoreSpec(("stuck",), "stuck_store:open_store")]


def test_its_death_is_an_error_and_the_next_save_starts_another(
    tmp_path: Path, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck_store.py").write_text(STUCK)
    monkeypatch.syspath_prepend(tmp_path)  # the process looks for modules where this one does
    registry().register(Stuck(), "stuck")
    try:
        handle = async_save(state(1), f"stuck://{tmp_path}/1", platform=platform, options=OPTIONS)
    finally:
        registry().unregister("stuck")
    while not (tmp_path / "1.begun").exists():
        assert not handle.done()
    pid = writer(platform).pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StoreError, match=r"process that writes to .*1 died \(exit code -9\)"):
        handle.result(30)
    assert not (tmp_path / "1" / "manifest.json").exists()
    async_save(state(1), tmp_path / "1", platform=platform, options=OPTIONS).result(30)
    assert equal(read(tmp_path / "1"), 1)
    assert writer(platform).pid != pid


def test_its_errors_come_back_as_they_are(tmp_path: Path, platform: Platform) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        async_save(state(), tmp_path / "file" / "c", platform=platform, options=OPTIONS).result(30)
    async_save(state(), tmp_path / "c", platform=platform, options=OPTIONS).result(30)
    assert equal(read(tmp_path / "c"), 1.0)


@pytest.mark.parametrize("call", ["os.ftruncate", "mmap.mmap"])
def test_shared_memory_that_is_refused(
    tmp_path: Path, platform: Platform, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(f"hyper_ckpt.engine.shared_memory.{call}", refuse)
        with pytest.raises(StoreError, match=r"shared copy of .* bytes failed: .*File too large.*executor="):
            async_save({"w": np.ones(1000)}, tmp_path / "c", platform=platform, options=OPTIONS).result()
    assert len(os.listdir("/proc/self/fd")) == before
    async_save({"w": np.ones(1000)}, tmp_path / "c", platform=platform, options=OPTIONS).result()
    assert read(tmp_path / "c")["w"].sum() == 1000


def test_progress_comes_back(tmp_path: Path, platform: Platform) -> None:
    events: list[Event] = []

    class Recorder:
        @hookimpl
        def hyper_ckpt_events(self) -> list[EventSpec]:
            return [EventSpec("recorder", lambda: events.append)]

    registry().register(Recorder(), "recorder")
    try:
        async_save(state(), tmp_path / "c", platform=platform, options=OPTIONS).result(30)
    finally:
        registry().unregister("recorder")
    assert [e.kind for e in events if e.kind != "progress"] == ["start", "agreed", "staged", "durable"]
    assert events[-1].bytes_done == events[-1].bytes_total > 2_400_000


def test_shards_on_a_device_of_which_a_rank_writes_a_part(tmp_path: Path) -> None:
    """Two ranks hold the same: each writes some columns or rows of what was copied whole."""
    layout = MeshLayout(Mesh((2,), (0, 1)), (Replicate(),))
    wide = MeshLayout(Mesh((2,), (0, 1)), (Shard(1),))
    whole = np.arange(2_000_000, dtype="f4").reshape(1000, 2000)

    def job(platform: Platform) -> None:
        rank = platform.ranks.rank
        mine = {
            "r": distribute(whole, layout, rank, on_device=True),
            "s": distribute(whole, wide, rank, on_device=True),
        }
        async_save(mine, tmp_path / "c", platform=platform, timeout=60, options=OPTIONS).result(60)
        writer(platform).close()

    run_world(2, job, platform=meshed_platform)
    found = read(tmp_path / "c")
    assert np.array_equal(found["r"], whole)
    assert np.array_equal(found["s"], whole)


def test_nothing_is_left(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    platform = NumpyPlatform()
    for i in range(3):
        async_save({"x": np.ones((i + 1) << 18)}, tmp_path / str(i), platform=platform, options=OPTIONS).result(30)
    pid = writer(platform).pid
    writer(platform).close()
    assert not Path(f"/proc/{pid}").exists()
    del platform
    end = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before
