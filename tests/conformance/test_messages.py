"""What authors are told: where their plugin raised and with what, where a check hangs, and what comes close."""

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hyper_ckpt.cli.app import cli
from hyper_ckpt.contracts.platform import LocalShard, TensorDescription
from hyper_ckpt.contracts.store import Bytes, ByteStore, Expect, ObjectInfo
from hyper_ckpt.errors import FileSizeError, MissingFileError, StoreError
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.conformance import threads
from hyper_ckpt.testing.conformance.check import Check, run_checks
from hyper_ckpt.testing.conformance.platform import PLATFORM_CHECKS, PlatformBench
from hyper_ckpt.testing.conformance.store import STORE_CHECKS, run_on
from hyper_ckpt.testing.faults import WrapperStore

from ._bad_stores import GoodSink, with_sink
from ._parts import GoodTensors, PartsProbe

CHECKS = {check.name: check for check in (*PLATFORM_CHECKS, *STORE_CHECKS)}


class RaisesForScalars(GoodTensors):
    def local_shards(self, value: Any) -> list[LocalShard]:
        return [_first(super().local_shards(value))]


def _first(shards: list[LocalShard]) -> LocalShard:
    return shards[0] if shards[0].sizes else shards[1]


class RaisesForObjects(GoodTensors):
    def describe(self, value: Any) -> TensorDescription | None:
        return super().describe(value) if value.shape is not None else None


def message_of(check: str, probe: PartsProbe, folder: Path) -> str:
    with PlatformBench(probe, folder, timeout=10) as bench:
        (outcome,) = run_checks([CHECKS[check]], bench.run)
    assert outcome.status == "failed"
    return outcome.message


def test_what_a_plugin_raises_is_shown_with_its_input_and_place(tmp_path: Path) -> None:
    message = message_of("local_shards_of_a_plain_tensor", PartsProbe(RaisesForScalars), tmp_path)
    assert "seen: IndexError" in message
    assert "dtype 'bool', shape ()" in message
    assert f"{__file__}:" in message
    assert "in _first" in message


def test_describe_of_no_tensor_is_what_is_blamed(tmp_path: Path) -> None:
    for check in ("describe_knows_only_tensors", "a_rank_that_fails_is_named"):
        message = message_of(check, PartsProbe(RaisesForObjects), tmp_path / check)
        assert "AttributeError" in message
        assert "decide by the value's type alone" in message
        assert "KeyValueStore" not in message


class Hangs(GoodSink):
    hanging, over = threading.Semaphore(0), threading.Event()

    def write_at(self, offset: int, data: Bytes) -> None:
        Hangs.hanging.release()
        Hangs.over.wait()


def test_a_store_that_hangs_is_shown_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is up as soon as it hangs: no check runs longer, and none is stopped before."""
    before = set(threading.enumerate())
    for name, calls in {"what_was_written_is_read": 1, "large_objects_by_several_threads": 8}.items():
        wait = lambda *_, calls=calls: [Hangs.hanging.acquire() for _ in range(calls)]  # noqa: E731
        monkeypatch.setattr(threads, "_wait", wait)
        store = with_sink(Hangs)(LocalStore(tmp_path / name))

        def run(check: Check, store: ByteStore = store) -> None:
            run_on(check, lambda: store, timeout=0.5)

        (outcome,) = run_checks([CHECKS[name]], run)
        assert outcome.status == "failed"
        assert "did not end within 0.5 s" in outcome.message
        assert "in write_at" in outcome.message
    Hangs.over.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()


def test_what_hangs_in_this_process_is_ended_and_named(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        textwrap.dedent(
            """
            import threading
            from hyper_ckpt.testing.conformance.numpy_probe import NumpyProbe

            class Probe(NumpyProbe):
                def meta(self, dtype, shape):
                    threading.Event().wait()
            """
        )
    )
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.contracts.platform import PlatformSpec
from hyper_ckpt.hookspecs import hookimpl
from hyper_ckpt.registry import registry
class Plugin:
    @hookimpl
    def hyper_ckpt_platforms(self):
        return [PlatformSpec("hanging", (), lambda: 0, NumpyPlatform, "", "hanging:Probe")]
registry().register(Plugin(), "hanging")
from hyper_ckpt.cli.app import cli
options = ["--platform", "hanging", "--check", "meta_tensors", "--limit", "3"]
cli(["conformance", *options, "--report", {str(tmp_path / "r")!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "meta_tensors" in done.stdout
    assert "in meta" in done.stderr
    assert json.loads((tmp_path / "r").read_text())["running"] == "meta_tensors"


def run(*arguments: str) -> str:
    return " ".join(CliRunner().invoke(cli, ["conformance", *arguments]).output.split())


def test_names_that_come_close() -> None:
    assert "Did you mean groups_are_kept" in run("--platform", "numpy", "--check", "group_are_kept")
    assert "--list shows all" in run("--platform", "numpy", "--check", "xyz")
    assert "Did you mean world" in run("--platform", "numpy", "--without", "wrold=why")


def test_checks_are_listed() -> None:
    both, stores = run("--list"), run("--list", "--store", "x")
    assert all(check.promise in both for check in CHECKS.values())
    assert "groups_are_kept" not in stores
    assert "lists_by_prefix" in stores


class Inherited(WrapperStore):
    """Reads as `ByteStore` does."""

    def read(self, name: str) -> bytes:
        return ByteStore.read(self, name)


class ReplacedWhileRead(Inherited):
    """Each stat is followed by a publish, `times` times."""

    def __init__(self, inner: ByteStore, contents: list[bytes]) -> None:
        super().__init__(inner)
        self.contents = contents

    def stat(self, name: str) -> ObjectInfo | None:
        info = super().stat(name)
        if self.contents:
            self.inner.publish(name, self.contents.pop(0), Expect.ANY, sync=False)
        return info


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    store = MemoryStore("memory://inherited-read")
    store.publish("m", b"first", Expect.ABSENT, sync=False)
    yield store
    MemoryStore.drop_bucket("inherited-read")


def test_the_inherited_read_gives_one_version(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyper_ckpt.contracts.store._LAST_PAUSE", 0.001)
    assert Inherited(memory).read("m") == b"first"
    for new in (b"longer than the first", b"short"):
        assert ReplacedWhileRead(memory, [new]).read("m") == new
    with pytest.raises(MissingFileError, match="gone"):
        Inherited(memory).read("gone")
    with pytest.raises(StoreError, match="replaced during each"):
        ReplacedWhileRead(memory, [b"%d" % i for i in range(1000)]).read("m")


def test_the_inherited_read_tells_of_an_object_that_is_too_short(memory: MemoryStore) -> None:
    class Longer(Inherited):
        def stat(self, name: str) -> ObjectInfo | None:
            info = super().stat(name)
            return info and ObjectInfo(info.size + 1, info.etag, info.modified)

    with pytest.raises(FileSizeError):
        Longer(memory).read("m")


def test_the_inherited_read_passes_the_suite(tmp_path: Path) -> None:
    for name in ("readers_see_old_or_new", "a_missing_object_is_an_error", "an_empty_object_is_an_object"):
        run_on(CHECKS[name], lambda name=name: Inherited(LocalStore(tmp_path / name)))  # type: ignore[misc]
