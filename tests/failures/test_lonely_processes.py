"""Processes that a launcher started together, and that have no process group to talk through."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_ckpt import NumpyPlatform, save
from hyper_ckpt.contracts.platform import PlatformSpec
from hyper_ckpt.errors import PlatformError
from hyper_ckpt.hookspecs import hookimpl
from hyper_ckpt.registry import registry

LONELY = """
import sys, warnings
from hyper_ckpt import CheckpointError, CheckpointManager, NumpyPlatform, async_save, load, read, save

path = sys.argv[1]
state = {"x": 1}
calls = {
    "save": lambda: save(state, path + "/save", overwrite=True),
    "async_save": lambda: async_save(state, path + "/async", overwrite=True).result(),
    "no collectives": lambda: save(state, path + "/none", use_collectives=False),
    "no_dist": lambda: save(state, path + "/c", no_dist=True),
    "platform": lambda: save(state, path + "/c", overwrite=True, platform=NumpyPlatform()),
    "named": lambda: save(state, path + "/c", overwrite=True, platform="numpy"),
    "load": lambda: load(state, path + "/c"),
    "read": lambda: read(path + "/c"),
    "manager": lambda: CheckpointManager(path + "/run").save(1, state),
    "manager, async": lambda: CheckpointManager(path + "/run").async_save(1, state).result(),
    "manager, no_dist": lambda: CheckpointManager(path + "/run", no_dist=True).save(1, state),
    "restore": lambda: CheckpointManager(path + "/run").restore(state),
}
for name, call in calls.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
            outcome = "warned" if caught else "done"
        except CheckpointError as error:
            ways = all(way in str(error) for way in ("no_dist=True", "platform="))
            outcome = type(error).__name__ + " names both ways" * ways
    print(name, outcome, sep=": ")
"""
"""What each call comes to, in a process that the launcher says is one of several."""


@pytest.mark.parametrize(("variable", "size"), [("WORLD_SIZE", "2"), ("MS_WORKER_NUM", "2"), ("WORLD_SIZE", "1")])
def test_processes_without_a_process_group_do_not_save(tmp_path: Path, variable: str, size: str) -> None:
    """Each would save over the others; what only reads goes on, with one warning."""
    done = subprocess.run(
        [sys.executable, "-c", LONELY, str(tmp_path)],
        env={**os.environ, variable: size},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    outcomes = dict(line.split(": ") for line in done.stdout.splitlines())
    saves = ("save", "async_save", "no collectives", "manager", "manager, async")
    if size == "1":
        assert set(outcomes.values()) == {"done"}
        return
    assert {name: outcomes.pop(name) for name in saves} == dict.fromkeys(saves, "PlatformError names both ways")
    assert outcomes.pop("load") == "warned"
    assert set(outcomes.values()) == {"done"}, outcomes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "run"], "nothing was written by what was refused"


def test_a_state_of_another_framework_than_the_process_group_is_not_saved(tmp_path: Path) -> None:
    """Every rank would save it as if alone."""

    class Plugin:
        @hookimpl
        def hyper_ckpt_platforms(self) -> list[PlatformSpec]:
            return [
                PlatformSpec("grouped", ("grouped",), lambda: 4, NumpyPlatform, "pip install grouped"),
                PlatformSpec("lonely", ("lonely",), lambda: 0, NumpyPlatform, "pip install lonely"),
            ]

    registry().register(Plugin(), "two frameworks")
    try:
        with pytest.raises(PlatformError, match="grouped has a process group of 4 ranks"):
            save({"x": type("Tensor", (), {"__module__": "lonely"})()}, tmp_path / "c")
    finally:
        registry().unregister("two frameworks")
    assert not (tmp_path / "c").exists()
