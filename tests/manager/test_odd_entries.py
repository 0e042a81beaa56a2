"""One bad entry of a run: what is no file, cannot be read, or is a link. The rest of the run goes on."""

import contextlib
import errno
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import hyper_ckpt
from hyper_ckpt import CheckpointError, Retention
from hyper_ckpt.cli.app import cli
from hyper_ckpt.errors import CheckpointExistsError, CorruptCheckpointError, StoreError, UnreadableFileError
from hyper_ckpt.manager.note import NOTE_NAME
from hyper_ckpt.manager.removal import remove_checkpoint

from ._runs import complete, fill, manager, state

NEWEST = "step-0000000002"


def fifo(path: Path) -> None:
    _remove(path)
    os.mkfifo(path)


def device(path: Path) -> None:
    _remove(path)
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    _remove(path)
    path.mkdir()


def loop(path: Path) -> None:
    _remove(path)
    path.symlink_to(path.name)


def huge(path: Path) -> None:
    _remove(path)
    with open(path, "wb") as file:
        file.truncate(50 << 30)


KINDS = {each.__name__: each for each in (fifo, device, directory, loop, huge)}
PLACES = {"manifest": "manifest.json", "receipt": "receipts/*", "data": "*.safetensors"}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def run(*words: object) -> Result:
    result = CliRunner().invoke(cli, [*map(str, words)], prog_name="hyper-ckpt")
    assert "unexpected" not in result.output
    return result


def goes_on(root: Path, seen: bool = True) -> None:
    """The newest step is bad; everything else works, and says why.

    Args:
        seen: without any data or receipt being read.
    """
    target = state(9)
    with pytest.warns(UserWarning, match=r"step 1 of .* was loaded, since newer ones cannot be: step 2: .*step-0*2"):
        restored = manager(root).restore(target)
    assert restored is not None
    assert (restored.step, target["step"]) == (1, 1)
    with pytest.warns(UserWarning, match="step 2: ") if seen else contextlib.nullcontext():
        assert manager(root).latest() == (1 if seen else 2)
    for call in (
        lambda: hyper_ckpt.load(state(), root / NEWEST, no_dist=True),
        lambda: hyper_ckpt.read(root / NEWEST),
        lambda: manager(root).restore(state(), step=2),
    ):
        with pytest.raises((CorruptCheckpointError, UnreadableFileError)):
            call()
    for command in ("verify", "cp"):
        result = run(command, root / NEWEST, *[root.parent / "copy"] * (command == "cp"))
        assert result.exit_code in (1, 4), result.output
    assert not (root.parent / "copy").exists()
    shown = run("ls", root)
    assert shown.exit_code == 0
    assert "step-0000000001" in shown.output
    assert seen == any(word in shown.output for word in ("damaged", "unreadable"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # whether what cannot be read is left of a dead save, is not known
        fill(root, 3, 4, retention=Retention(last=1)).close()
    assert complete(manager(root)) == [4]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file(tmp_path: Path, kind: str, place: str) -> None:
    root = tmp_path / "run"
    fill(root, 1, 2)
    (path,) = (root / NEWEST).glob(PLACES[place])
    KINDS[kind](path)
    goes_on(root, seen=place != "receipt" or kind in ("fifo", "directory"))
    assert run("clean", root, "--older-than", "0s").exit_code in (0, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_note_that_cannot_be_read_is_a_pin(tmp_path: Path, kind: str) -> None:
    with manager(tmp_path, retention=Retention(last=1)) as m:
        m.save(1, state(1), metrics={"loss": 1.0})
        KINDS[kind](tmp_path / "step-0000000001" / NOTE_NAME)
        m.save(2, state(2))
        m.save(3, state(3))
        assert [(i.step, i.pinned) for i in m.steps()] == [(1, True), (3, False)]
        if kind not in ("huge", "device"):  # a link and a file are replaced
            with pytest.raises(StoreError, match=NOTE_NAME):
                m.save(1, state(1), metrics={"loss": 2.0})
        assert m.restore(state(), step=1) is not None
    assert run("ls", tmp_path).exit_code == 0


@pytest.mark.parametrize("kind", ["fifo", "loop", "huge"])
def test_what_lies_in_a_steps_place(tmp_path: Path, kind: str) -> None:
    fill(tmp_path, 1, 2)
    (tmp_path / "step-0000000003").mkdir()
    KINDS[kind](tmp_path / "step-0000000003")
    (tmp_path / "odd\n\x1bname").mkdir()
    (tmp_path / os.fsdecode(b"odd-\xff")).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a link to itself is named
        assert manager(tmp_path).latest() == 2
        restored = manager(tmp_path).restore(state())
    assert restored is not None
    assert restored.step == 2
    assert run("ls", tmp_path).exit_code == 0
    assert run("clean", tmp_path).exit_code == 0
    with pytest.raises(CheckpointError, match="step-0000000003"):
        fill(tmp_path, 3)
    fill(tmp_path, 4, retention=Retention(last=1)).close()
    assert complete(manager(tmp_path)) == [4]


@pytest.mark.parametrize("place", [*PLACES, "note", "receipts folder", "step folder"])
def test_what_fails_to_be_read(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a broken disk does it."""
    root = tmp_path / "run"
    fill(root, 1, 2)
    patterns = {**PLACES, "note": NOTE_NAME, "receipts folder": "receipts", "step folder": "."}
    broken = str(root / NEWEST / patterns[place].rstrip("*")).rstrip("/.")
    broken = next(iter((root / NEWEST).glob(patterns[place])), Path(broken)) if place in PLACES else Path(broken)
    manager(root).pin(2)
    real, scandir = os.preadv, os.scandir

    def preadv(fd: int, *args: Any) -> int:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(broken):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *args)

    def listing(path: str) -> Any:
        if Path(path).is_relative_to(broken):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scandir(path)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "scandir", listing)
    if place == "note":
        assert [i.pinned for i in manager(root).steps()] == [False, True]
        return
    target = state()
    with pytest.warns(
        UserWarning, match=r"step 1 of .* was loaded, since newer ones cannot be: step 2: .*Input/output"
    ):
        manager(root).restore(target)
    assert target["step"] == 1
    assert run("verify", root / NEWEST).exit_code in (1, 4)
    assert "step-0000000001" in run("ls", root).output
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fill(root, 3, retention=Retention(last=1)).close()
    assert 3 in complete(manager(root))


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Without the rights of the superuser, who may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A root of a run that `nobody` may use."""
    with nobody():
        root = Path(tempfile.mkdtemp())
    try:
        yield root / "run"
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize("place", [*PLACES, "step folder"])
def test_what_may_not_be_read(open_root: Path, place: str) -> None:
    with nobody():
        fill(open_root, 1, 2)
        for path in [open_root / NEWEST] if place == "step folder" else (open_root / NEWEST).glob(PLACES[place]):
            path.chmod(0)
        with pytest.raises(UnreadableFileError, match="Permission denied"):
            hyper_ckpt.load(state(), open_root / NEWEST, no_dist=True)
        goes_on(open_root, seen=place in ("manifest", "step folder"))


class TestLinks:
    """A step that is a link to a checkpoint elsewhere."""

    @pytest.fixture
    def archive(self, tmp_path: Path) -> Path:
        hyper_ckpt.save(state(1), tmp_path / "archive", no_dist=True)
        return tmp_path / "archive"

    @pytest.fixture
    def root(self, tmp_path: Path, archive: Path) -> Path:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/step-0000000001").symlink_to(archive)
        return tmp_path / "run"

    @staticmethod
    def files(folder: Path) -> dict[str, bytes]:
        return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}

    def test_it_is_read_and_stays(self, root: Path, archive: Path) -> None:
        before, target = self.files(archive), state()
        assert manager(root).restore(target) is not None
        assert target["step"] == 1
        m = fill(root, 2, 3, retention=Retention(last=1))
        assert complete(m) == [1, 3]
        for call in (lambda: m.save(1, state(9)), lambda: m.delete(1), lambda: m.pin(1)):
            with pytest.raises(CheckpointError, match="symbolic link"):
                call()
        assert self.files(archive) == before

    def test_it_is_not_counted(self, tmp_path: Path, root: Path, archive: Path) -> None:
        os.rename(root / "step-0000000001", root / "step-0000000009")
        m = fill(root, 1, 2, retention=Retention(last=1))
        assert complete(m) == [2, 9]

    @pytest.mark.parametrize("how", ["rm", "clean", "overwrite"])
    def test_commands_leave_what_it_leads_to(self, root: Path, archive: Path, how: str) -> None:
        before = self.files(archive)
        if how == "rm":
            result = run("rm", "--yes", "--force", root / "step-0000000001")
            assert result.exit_code == 4
            assert "is a symbolic link" in result.output
        elif how == "clean":
            (archive / "manifest.json").unlink()
            before = self.files(archive)
            assert run("clean", root, "--older-than", "0s").exit_code == 0
        else:
            with pytest.raises(CheckpointExistsError):
                manager(root).save(1, state(5))
        assert self.files(archive) == before
        assert (root / "step-0000000001").is_symlink()

    def test_what_is_inside_a_step_goes_itself(self, root: Path, archive: Path) -> None:
        before = self.files(archive)
        step = root / "step-0000000005"
        step.mkdir()
        for each in archive.iterdir():
            (step / each.name).symlink_to(each)
        target = state()
        hyper_ckpt.load(target, step, no_dist=True)
        assert target["step"] == 1
        with pytest.raises(StoreError, match=r"receipts is a symbolic link"):
            hyper_ckpt.save(state(6), step, no_dist=True, overwrite=True)
        assert self.files(archive) == before
        remove_checkpoint(str(step))
        assert self.files(archive) == before
        assert os.listdir(step) == ["receipts"]

    def test_the_root_may_be_one(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "run").symlink_to(tmp_path / "disk")
        m = fill(tmp_path / "run", 1, 2, 3, retention=Retention(last=2))
        assert complete(m) == [2, 3]
        m.delete(2)
        assert os.listdir(tmp_path / "disk") == ["step-0000000003"]
        assert run("rm", "--yes", tmp_path / "run" / "step-0000000003").exit_code == 0
        assert os.listdir(tmp_path / "disk") == []

    def test_a_step_that_becomes_one_while_it_is_removed(
        self, root: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(root, 4)
        shutil.copytree(root / "step-0000000004", root.parent / "other")  # with the same names
        before, real = self.files(root.parent / "other"), os.unlink

        def swapped(name: str, *, dir_fd: int | None = None) -> None:
            real(name, dir_fd=dir_fd)
            if not (root / "moved").exists():
                os.rename(root / "step-0000000004", root / "moved")
                (root / "step-0000000004").symlink_to(root.parent / "other")

        monkeypatch.setattr(os, "unlink", swapped)
        with pytest.raises(StoreError, match="symbolic link"):
            manager(root).delete(4)
        assert self.files(root.parent / "other") == before
