"""What users write for a place on local disks: ~, file:// URLs, relative paths."""

import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from click.testing import CliRunner

import hyper_ckpt
from hyper_ckpt import CheckpointManager, FileSystemReader, FileSystemWriter
from hyper_ckpt.cli.app import cli
from hyper_ckpt.errors import StoreError
from hyper_ckpt.registry import registry
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.paths import local_path
from hyper_ckpt.testing.world import run_world


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home directory, and another one as the current directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    assert not (tmp_path / "here" / "~").exists()
    assert os.listdir(tmp_path / "here") == []


def state(fill: float = 1.0) -> dict:
    return {"w": np.full(3, fill, "f4"), "step": int(fill)}


@pytest.mark.parametrize("where", ["~/run/c", Path("~/run/c"), PurePosixPath("~/run/c")])
def test_the_home_directory(home, where):
    hyper_ckpt.save(state(), where)
    assert (home / "run" / "c" / "manifest.json").exists()
    hyper_ckpt.load(target := state(0), where)
    assert target["step"] == 1
    assert hyper_ckpt.read(where)["step"] == 1
    assert hyper_ckpt.verify(where).ok
    hyper_ckpt.async_save(state(2), where, overwrite=True).result()
    assert hyper_ckpt.read(home / "run" / "c")["step"] == 2


def test_writers_readers_and_managers(home):
    hyper_ckpt.save(state(), storage_writer=FileSystemWriter("~/c"))
    assert hyper_ckpt.read(storage_reader=FileSystemReader("~/c"))["step"] == 1
    with CheckpointManager(Path("~/run")) as manager:
        manager.save(4, state(4))
        assert [step.path for step in manager.steps()] == [str(home / "run" / "step-0000000004")]
        assert manager.restore(target := state(0)) is not None
        assert target["step"] == 4


def test_ranks_may_write_one_path_differently(home):
    spellings = ["~/c", str(home / "c"), (home / "c").as_uri(), "../home/c"]

    def job(platform):
        where = spellings[platform.ranks.rank]
        hyper_ckpt.save(state(), where, platform=platform, timeout=30)
        hyper_ckpt.load(target := state(0), where, platform=platform, timeout=30)
        return target["step"]

    assert run_world(4, job) == [1] * 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ls", "~/run"], "step-1"),
        (["show", "~/run/step-1"], "float32"),
        (["verify", "~/run/step-1"], "ok"),
        (["cp", "~/run/step-1", "~/copy"], ""),
        (["clean", "~/run"], ""),
        (["rm", "--yes", "~/run/step-1"], ""),
        (["ls", "file://localhost~"], None),
    ],
)
def test_commands_whose_arguments_no_shell_has_expanded(home, arguments, says):
    hyper_ckpt.save(state(), "~/run/step-1")
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code == 0) == (says is not None), result.output
    assert says is None or says in result.output
    assert "cp" not in arguments or (home / "copy" / "manifest.json").exists()


def test_a_report_in_the_home_directory(home):
    arguments = ["conformance", "--store", "~/place", "--check", "listing_is_by_prefix", "--report", "~/report.json"]
    result = CliRunner().invoke(cli, arguments)
    assert (home / "report.json").exists() or "no check" in result.output.lower(), result.output
    assert not (home / "place").exists() or os.listdir(home / "place") == []


def test_urls(home, tmp_path):
    odd = tmp_path / "a b%c#d?e \u00e9"
    assert local_path(odd.as_uri()) == str(odd)
    assert local_path(f"file://localhost{odd}".replace("%", "%25")) == str(odd)
    assert local_path("FILE:///x/../y/") == "/y"
    assert local_path(os.fsdecode(b"/raw-\xff")) == local_path("file:///raw-%FF")
    hyper_ckpt.save(state(), odd.as_uri())
    assert hyper_ckpt.read(str(odd))["step"] == 1
    assert registry().store(odd.as_uri()).url == LocalStore(odd).url == str(odd)
    assert LocalStore(odd.as_uri()).url == str(odd)
    hyper_ckpt.save(state(2), str(odd), overwrite=True)
    assert hyper_ckpt.read(odd.as_uri())["step"] == 2


@pytest.mark.parametrize("url", ["file://", "file://host/x", "file://relative", "file://~/x", "file:///a%00b"])
def test_urls_that_name_no_directory_of_this_machine(url, home):
    with pytest.raises(StoreError, match="names no directory"):
        hyper_ckpt.save(state(), url)


def test_what_is_no_home_directory(home, monkeypatch):
    import pwd

    me = pwd.getpwuid(os.getuid())
    assert local_path(f"~{me.pw_name}/x") == os.path.join(os.path.abspath(me.pw_dir), "x")
    with pytest.raises(StoreError, match=r"there is no user 'no-such-user'.*\./~no-such-user"):
        local_path("~no-such-user/x")
    for value in ("", "relative"):
        monkeypatch.setenv("HOME", value)
        with pytest.raises(StoreError, match="HOME is set to no absolute path"):
            hyper_ckpt.save(state(), "~/x")
    monkeypatch.delenv("HOME")
    assert local_path("~/x") == os.path.join(os.path.abspath(me.pw_dir), "x")
    assert local_path("./~") == os.path.join(os.getcwd(), "~")
    assert local_path("a/~") == os.path.join(os.getcwd(), "a", "~")
    assert local_path("/a/~b") == "/a/~b"


def test_a_home_directory_that_is_not_there_is_an_error_of_the_store(tmp_path):
    """HOME of services: /nonexistent, which nobody may make."""
    script = "import hyper_ckpt, numpy; hyper_ckpt.save({'w': numpy.ones(1)}, '~/c')"
    (tmp_path / "file").write_bytes(b"")
    environment = {**os.environ, "HOME": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode
    assert "hyper_ckpt.errors.UnreadableFileError: " in done.stderr  # a StoreError
    assert sorted(os.listdir(tmp_path)) == ["file"]
