"""What is in flight when the interpreter ends: finished, or reported; and failures that nobody looked at."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hyper_ckpt
from hyper_ckpt.errors import CheckpointNotFoundError

BEGIN = """
    import sys, threading, time
    import numpy as np
    from hyper_ckpt import async_save
    from hyper_ckpt.storage.local_store import LocalStore

    create = LocalStore.create
    path = sys.argv[1]
"""


def ran(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(BEGIN) + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise KeyError(1)"])
def test_it_is_finished(tmp_path: Path, ending: str) -> None:
    script = f"""
    LocalStore.create = lambda *a: (time.sleep(0.5), create(*a))[1]
    async_save({{"x": np.arange(1 << 20), "list": [1, 2]}}, path + "/a")
    async_save({{"x": np.arange(10)}}, path + "/b")
    {ending}
    """
    done = ran(script, tmp_path)
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(ending, 1)
    assert hyper_ckpt.verify(tmp_path / "a").ok
    assert hyper_ckpt.read(tmp_path / "b")["x"].tolist() == list(range(10))
    assert "hyper_ckpt" not in done.stderr.replace("import hyper_ckpt", "")


def test_what_takes_too_long_is_reported_and_left(tmp_path: Path) -> None:
    script = """
    LocalStore.create = lambda *a: (time.sleep(30), create(*a))[1]
    async_save({"x": np.arange(10)}, path + "/a", timeout=0.5)
    """
    done = ran(script, tmp_path)
    assert done.returncode == 0
    assert "a was not over when the process ended: it is not published" in done.stderr
    with pytest.raises(CheckpointNotFoundError):
        hyper_ckpt.read(tmp_path / "a")


def test_a_failure_nobody_asked_for_is_printed(tmp_path: Path) -> None:
    script = """
    def refuse(store, name, size):
        raise OSError(28, "no space left")

    LocalStore.create = refuse
    async_save({"x": np.arange(10)}, path + "/a")
    """
    done = ran(script, tmp_path)
    assert "nobody asked for its result: OSError: [Errno 28] no space left" in done.stderr


def test_a_failure_that_was_asked_for_is_not(tmp_path: Path) -> None:
    script = """
    def refuse(store, name, size):
        raise OSError(28, "no space left")

    LocalStore.create = refuse
    async_save({"x": np.arange(10)}, path + "/a").exception()
    """
    assert ran(script, tmp_path).stderr == ""
