"""What breaks background saves in practice: interrupts, forks, threads that outlive the main one, skewed ranks."""

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import NumpyPlatform, SaveOptions, async_save, read, save
from hyper_ckpt.api.common import in_flight
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import CheckpointError, SaveInFlightError
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.world import run_world

BEGIN = """
    import atexit, os, sys, threading, time
    import numpy as np
    from hyper_ckpt import SaveOptions, async_save, save
    from hyper_ckpt.storage.local_store import LocalStore

    create, path = LocalStore.create, sys.argv[1]

    def slow(seconds):
        LocalStore.create = lambda *a: (time.sleep(seconds), create(*a))[1]
"""


def ran(script: str, path: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(BEGIN) + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=timeout)


def test_saves_of_a_thread_that_outlives_the_main_one(tmp_path: Path) -> None:
    script = """
    slow(0.2)

    def train():
        for step in range(3):
            async_save({"x": np.arange(step + 1)}, f"{path}/{step}")
            time.sleep(0.3)

    threading.Thread(target=train).start()
    """
    done = ran(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for step in range(3):
        assert len(read(tmp_path / str(step))["x"]) == step + 1


def test_saves_at_exit(tmp_path: Path) -> None:
    script = """
    slow(0.1)
    atexit.register(lambda: async_save({"x": np.arange(2)}, path + "/late"))
    if len(sys.argv[1]) % 2:
        async_save({"x": np.arange(1)}, path + "/first")
    """
    for name in ("odd", "even"):
        done = ran(script, tmp_path / name)
        assert (done.returncode, done.stderr) == (0, "")
        assert read(tmp_path / name / "late")["x"].tolist() == [0, 1]


def test_every_unseen_failure_is_printed_also_beside_a_late_save(tmp_path: Path) -> None:
    script = """
    def create(store, name, size):
        if "late" in store.url:
            time.sleep(30)
        raise OSError(28, f"no space for {store.url[-4:]}")

    LocalStore.create = create
    options = SaveOptions(max_in_flight=3)
    for name in ("/one1", "/two2", "/late"):
        async_save({"x": np.arange(9)}, path + name, options=options, timeout=1)
    """
    error = ran(script, tmp_path).stderr
    assert all(text in error for text in ("no space for one1", "no space for two2", "late was not over"))


@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_is_free_of_its_parents_saves(tmp_path: Path, busy: bool) -> None:
    script = f"""
    slow({2.0 if busy else 0.0})
    handle = async_save({{"x": np.arange(9)}}, path + "/parent")
    child = os.fork()
    if not child:
        LocalStore.create = create
        save({{"x": np.arange(2)}}, path + "/child", timeout=20)
        async_save({{"x": np.arange(3)}}, path + "/child-async", timeout=20)
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    handle.result()
    """
    done = ran(script, tmp_path, 30)
    assert done.returncode == 0, done.stderr
    assert [len(read(tmp_path / n)["x"]) for n in ("parent", "child", "child-async")] == [9, 2, 3]


@pytest.mark.parametrize("timeout", ["float('inf')", "1e10", "10**30"])
def test_endless_timeouts(tmp_path: Path, timeout: str) -> None:
    script = f"""
    slow(0.1)
    for step in range(2):
        async_save({{"x": np.arange(9)}}, f"{{path}}/{{step}}", timeout={timeout})
    """
    done = ran(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert hyper_ckpt.verify(tmp_path / "1").ok


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5", None, True])
@pytest.mark.parametrize("call", [save, async_save, hyper_ckpt.load])
def test_timeouts_that_cannot_be_meant(tmp_path: Path, call: Any, timeout: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="timeout must be"):
        call({"x": 1}, tmp_path / "c", timeout=timeout)


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", "x"), ("threads", 0), ("max_host_bytes", "x"), ("max_host_bytes", -1)]
    + [(name, 5) for name in ("options", "storage_writer", "planner", "platform")],
)
def test_arguments_that_cannot_be_meant(tmp_path: Path, name: str, value: Any) -> None:
    for call in (save, async_save):
        with pytest.raises((ValueError, TypeError), match=name):
            call({"x": 1}, tmp_path / "c", **{name: value})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("options", [{"max_in_flight": float("nan")}, {"save_token": ""}, {"save_token": 5}])
def test_options_that_cannot_be_meant(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SaveOptions(**options)


def test_an_interrupt_while_copying_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    platform = NumpyPlatform()
    with monkeypatch.context() as patch:
        patch.setattr("hyper_ckpt.api.async_save.snapshot", interrupted)
        with pytest.raises(KeyboardInterrupt):
            async_save({"x": np.ones(9)}, tmp_path / "c", platform=platform)
    in_flight(platform).wait_room(1, 30)
    assert in_flight(platform).failure() is None, "it was raised where it came"
    save({"x": np.ones(9)}, tmp_path / "c", platform=platform)


@pytest.mark.parametrize("most", [1, 3])
def test_one_path_saved_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    create = LocalStore.create
    monkeypatch.setattr(LocalStore, "create", lambda *a: (time.sleep(0.05), create(*a))[1])
    platform, options = NumpyPlatform(), SaveOptions(max_in_flight=most)
    handles = [
        async_save({"x": np.full(9, i)}, tmp_path / "latest", platform=platform, options=options, overwrite=True)
        for i in range(4)
    ]
    for handle in handles:
        handle.result(30)
    assert read(tmp_path / "latest")["x"].tolist() == [3] * 9


def test_platforms_made_for_one_call_are_forgotten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flights = []
    for i in range(5):
        platform = NumpyPlatform(rank=0, world_size=2)
        options = SaveOptions(save_token=f"t{i}")
        async_save({"x": 1}, tmp_path / str(i), platform=platform, use_collectives=False, options=options).result(30)
        flights.append(weakref.ref(in_flight(platform)))
    del platform
    end = time.monotonic() + 10
    while any(f() is not None for f in flights) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert [f() for f in flights] == [None] * 5
    assert capfd.readouterr().err == ""


def test_no_room_on_one_rank_only_keeps_ranks_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's background is slow: it finds no room in time. The call fails on both, and the next ones work."""
    url, create = f"memory://skew/{time.monotonic_ns()}", MemoryStore.create
    release = threading.Event()

    def slowly(store: Any, name: str, size: int) -> Any:
        if name.startswith("rank-00001") and store.url.endswith("/0"):
            release.wait(30)
        return create(store, name, size)

    monkeypatch.setattr(MemoryStore, "create", slowly)

    def job(platform: Platform) -> list[str]:
        rank, told = platform.ranks.rank, []
        for step in range(4):
            mine = {"x": hyper_ckpt.ShardedTensor([(np.ones((2, 3)), (2 * rank, 0))], (4, 3))}
            if step == 2:
                release.set()
                in_flight(platform).wait_room(1, 30)
            try:
                async_save(mine, f"{url}/{step}", platform=platform, timeout=1.0 if step == 1 else 30)
                told.append("")
            except CheckpointError as error:
                told.append(type(error).__name__)
        hyper_ckpt.save({}, f"{url}/last", platform=platform, timeout=30)
        return told

    first, second = run_world(2, job)
    assert first == second
    assert [bool(text) for text in first] == [False, True, False, False]
    assert first[1] in (SaveInFlightError.__name__, "RankTimeoutError")


def test_written_at_once_is_staged_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, publish = threading.Event(), LocalStore.publish

    def waits(store: Any, name: str, *args: Any, **options: Any) -> Any:
        if name == "manifest.json":
            gate.wait(30)
        return publish(store, name, *args, **options)

    monkeypatch.setattr(LocalStore, "publish", waits)
    with pytest.warns(UserWarning, match="max_host_bytes"):
        handle = async_save({"x": np.ones(1 << 20)}, tmp_path / "c", platform=NumpyPlatform(), max_host_bytes=1 << 20)
    handle.wait_staged(10)
    assert not handle.done()
    gate.set()
    handle.result(30)


def test_a_closed_error_stream(tmp_path: Path) -> None:
    script = """
    from hyper_ckpt.api import reporting

    reporting._INTERVAL_SECONDS = 0.0
    sys.stderr.close()
    save({"x": np.zeros(48 << 20, np.uint8)}, path + "/c")
    os._exit(0)
    """
    assert ran(script, tmp_path).returncode == 0
    assert hyper_ckpt.verify(tmp_path / "c").ok
