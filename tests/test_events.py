"""Observers: what they are told of a save and a load, that they cannot stop one, and the built-in ones."""

import logging
import os
import pty
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.builtin import log_lines, progress_bar
from hyper_ckpt.builtin.log_lines import LogLines
from hyper_ckpt.contracts.events import Event, EventSpec
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import CheckpointError
from hyper_ckpt.hookspecs import hookimpl
from hyper_ckpt.registry import registry
from hyper_ckpt.testing.world import run_world

Events = list[Event]


class Recorder:
    """A plugin that keeps what it is told, and may fail."""

    def __init__(self) -> None:
        self.events: Events = []
        self.lock = threading.Lock()
        self.fails_at: str | None = None

    @hookimpl
    def hyper_ckpt_events(self) -> list[EventSpec]:
        return [EventSpec("recorder", lambda: self)]

    def __call__(self, event: Event) -> None:
        with self.lock:
            self.events.append(event)
        if event.kind == self.fails_at:
            raise RuntimeError("no disk for logs")

    def kinds(self, rank: int = 0, call: str = "save") -> list[str]:
        return [e.kind for e in self.events if (e.rank, e.call) == (rank, call)]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    plugin = Recorder()
    registry().register(plugin, "recorder")
    yield plugin
    registry().unregister("recorder")


def state(fill: float = 1.0) -> dict[str, Any]:
    return {"w": np.full((1000, 1000), fill), "small": np.full(3, fill, "f4"), "step": 3}


def test_a_save_and_a_load_are_told_in_order(recorder: Recorder, tmp_path: Path) -> None:
    def job(platform: Platform) -> None:
        hyper_ckpt.save(state(), tmp_path / "c", platform=platform)
        hyper_ckpt.load(state(0.0), tmp_path / "c", platform=platform)

    run_world(2, job)
    for rank in range(2):
        saved = [k for k in recorder.kinds(rank) if k != "progress"]
        loaded = [k for k in recorder.kinds(rank, "load") if k != "progress"]
        assert (saved, loaded) == (["start", "agreed", "staged", "durable"], ["start", "agreed", "loaded"])
    ends = [e for e in recorder.events if e.kind == "durable"]
    assert sum(e.bytes_done for e in ends) == 8_000_012
    assert all(e.bytes_done == e.bytes_total > 0 for e in ends)
    by_rank = {e.rank: e for e in ends}
    files = sum(f.stat().st_size for f in (tmp_path / "c").glob("*.safetensors"))
    assert (by_rank[0].checkpoint_bytes, by_rank[1].checkpoint_bytes) == (files, 0)
    loads = [e for e in recorder.events if e.kind == "loaded"]
    assert [e.bytes_done for e in loads] == [e.bytes_total for e in loads] == [8_000_012] * 2
    assert all(e.checkpoint_id == str(tmp_path / "c") and e.world_size == 2 for e in recorder.events)
    for rank in range(2):
        seconds = [e.seconds for e in recorder.events if e.rank == rank and e.call == "save"]
        assert seconds == sorted(seconds)


def test_not_durable_is_not_called_so(recorder: Recorder, tmp_path: Path) -> None:
    hyper_ckpt.save(state(), tmp_path / "c", durable=False)
    assert recorder.kinds()[-1] == "published"


def test_a_failure_is_told_with_its_cause(recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        hyper_ckpt.save({"bad": object()}, tmp_path / "c")
    with pytest.raises(CheckpointError):
        hyper_ckpt.load({"x": 1}, tmp_path / "absent")
    ends = [(e.call, type(e.error).__name__) for e in recorder.events if e.kind == "failed"]
    assert ends == [("save", "UnsupportedTypeError"), ("load", "CheckpointNotFoundError")]


def test_reading_and_saving_alone_are_told(recorder: Recorder, tmp_path: Path) -> None:
    options = hyper_ckpt.SaveOptions(save_token="t")
    for rank in range(2):
        platform = hyper_ckpt.NumpyPlatform(rank=rank, world_size=2)
        hyper_ckpt.save(state(), tmp_path / "c", platform=platform, use_collectives=False, options=options)
    assert recorder.kinds(1) == ["start", "agreed", "staged", "durable"]
    hyper_ckpt.read(tmp_path / "c")
    assert recorder.kinds(0, "load") == ["start", "agreed", "loaded"]


def test_progress_adds_up(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyper_ckpt.api.reporting._INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr("hyper_ckpt.engine.blocks.GROUP_BYTES", 8 << 20)
    big = {"w": np.zeros(48 << 20, np.uint8)}
    hyper_ckpt.save(big, tmp_path / "c", threads=2)
    hyper_ckpt.load(big, tmp_path / "c", threads=2)
    for call in ("save", "load"):
        done = [e.bytes_done for e in recorder.events if (e.kind, e.call) == ("progress", call)]
        assert len(done) > 2
        assert max(done) == 48 << 20


@pytest.mark.parametrize("kind", ["start", "agreed", "progress", "staged", "durable"])
def test_an_observer_that_fails_stops_nothing(
    recorder: Recorder, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyper_ckpt.api.reporting._INTERVAL_SECONDS", 0.0)
    recorder.fails_at = kind
    with pytest.warns(UserWarning, match="'recorder' failed and hears no more.*no disk for logs"):
        hyper_ckpt.save(state(), tmp_path / "c")
    assert recorder.kinds()[-1] == kind
    assert hyper_ckpt.verify(tmp_path / "c").ok


def test_an_observer_that_does_not_load_stops_nothing(tmp_path: Path) -> None:
    def load() -> Any:
        raise ImportError("libtelemetry")

    plugin = types.SimpleNamespace(hyper_ckpt_events=hookimpl(lambda: [EventSpec("telemetry", load)]))
    registry().register(plugin, "telemetry")
    try:
        with pytest.warns(UserWarning, match="'telemetry'.*libtelemetry"):
            hyper_ckpt.save(state(), tmp_path / "c")
    finally:
        registry().unregister("telemetry")


def test_a_line_is_logged_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hyper_ckpt")
    run_world(2, lambda p: hyper_ckpt.save(state(), tmp_path / "c", platform=p))
    hyper_ckpt.load(state(0.0), tmp_path / "c")
    saved, loaded = (r.getMessage() for r in caplog.records)
    assert saved.startswith(f"saved {tmp_path / 'c'}: 7.6")
    assert saved.endswith("GB/s (2 ranks)")
    assert loaded.startswith(f"loaded {tmp_path / 'c'}: 7.6")
    caplog.clear()
    with pytest.raises(CheckpointError):
        hyper_ckpt.save({"bad": object()}, tmp_path / "d")
    assert "failed" in caplog.text
    assert "'bad'" in caplog.text


def event(kind: Any, done: int, seconds: float = 5.0, quiet: bool = False, rank: int = 0) -> Event:
    return Event(kind, "save", "run/step-1", "numpy", rank, 4, done, 100 << 20, 0, seconds, quiet)


def test_one_line_per_interval(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "hyper_ckpt")
    now = [100.0]
    monkeypatch.setattr(log_lines.time, "monotonic", lambda: now[0])
    observer, others, quiet = LogLines(), LogLines(), LogLines()
    for second in range(25):
        now[0] = 100.0 + second
        observer(event("progress", second << 20))
        others(event("progress", second << 20, rank=1))
        quiet(event("progress", second << 20, quiet=True))
    assert [r.getMessage() for r in caplog.records] == [
        "saving run/step-1: 10 %, 10.0 MiB of 100 MiB, 0.00 GB/s",
        "saving run/step-1: 20 %, 20.0 MiB of 100 MiB, 0.00 GB/s",
    ]
    caplog.clear()
    monkeypatch.setenv(progress_bar.PROGRESS_VARIABLE, "0")
    silent = LogLines()
    now[0] = 1000.0
    silent(event("progress", 1))
    assert not caplog.records


SCRIPT = """
    import sys
    from hyper_ckpt.builtin.progress_bar import ProgressBar
    from hyper_ckpt.contracts.events import Event

    def event(kind, done, seconds, rank=0):
        return Event(kind, "save", "run/[red]step-1", "numpy", rank, 4, done << 20, 100 << 20, 0, seconds, {quiet})

    for rank in {ranks}:
        bar = ProgressBar()
        for i in range(5):
            bar(event("progress", i * 20, i + {begin}, rank))
        bar(event("durable", 100, 6.0, rank))
        bar(event("progress", 100, 7.0, rank))
    print("rich" in sys.modules)
"""


def on_terminal(**values: Any) -> tuple[str, bool]:
    """What the script draws on the error stream, a terminal; and whether rich was imported."""
    main, terminal = pty.openpty()
    script = textwrap.dedent(SCRIPT).format(**{"quiet": False, "ranks": [0], "begin": 1.0, **values})
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **values.get("env", {})}
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=terminal, env=env, timeout=60, check=True
    )
    os.close(terminal)
    drawn = b""
    try:
        while part := os.read(main, 65536):
            drawn += part
    except OSError:  # the other end is closed: all is read
        pass
    os.close(main)
    return drawn.decode(), done.stdout.strip() == b"True"


def test_a_bar_on_a_terminal() -> None:
    drawn, _ = on_terminal()
    assert "saving [red]step-1" in drawn
    assert "100.0 MiB" in drawn


@pytest.mark.parametrize(
    "values",
    [{"quiet": True}, {"ranks": [1, 2]}, {"begin": -9.0}, {"env": {"HYPER_CKPT_PROGRESS": "0"}}],
    ids=["quiet", "other ranks", "short", "silenced"],
)
def test_no_bar(values: dict[str, Any]) -> None:
    assert on_terminal(**values) == ("", False)
