"""What is no regular file under an object's name, links on the way to one, and objects too large to be read whole."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hyper_ckpt.contracts.store import Expect
from hyper_ckpt.errors import ManifestError, MissingFileError, StoreError, UnreadableFileError
from hyper_ckpt.receipt import MAX_RECORD_BYTES, RECORD_HEAD
from hyper_ckpt.storage import syscalls
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.whole import begins_like_record, read_record, read_whole
from hyper_ckpt.testing.conformance.store import get, put


def socket_at(path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as each:
        each.bind(os.path.relpath(path))


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


KINDS: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "FIFO behind a link": link_to_fifo,
    "socket": socket_at,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": os.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    return LocalStore(tmp_path)


@pytest.fixture(params=KINDS)
def special(request: pytest.FixtureRequest, tmp_path: Path, store: LocalStore) -> str:
    """The kind of what lies at "a"."""
    KINDS[request.param](tmp_path / "a")
    return str(request.param)


def test_it_is_not_read(store: LocalStore, special: str) -> None:
    def by_reader() -> None:
        with store.reader("a") as read:
            read([memoryview(bytearray(1))], 0)

    for call in (lambda: store.read("a"), lambda: get(store, "a", 0, 1), by_reader):
        with pytest.raises(UnreadableFileError, match=r"reading .*/a failed: ") as caught:
            call()
        assert special == "link to itself" or special.partition(" ")[0] in str(caught.value)


def test_it_is_no_object(store: LocalStore, special: str) -> None:
    if special == "directory":
        assert store.stat("a") is None
    else:
        with pytest.raises(UnreadableFileError, match=r"looking up .*/a failed: "):
            store.stat("a")


@pytest.mark.parametrize("expect", [Expect.ANY, Expect.ABSENT, "1-2-3"])
def test_it_is_not_replaced(store: LocalStore, special: str, expect: Expect | str, tmp_path: Path) -> None:
    before = os.lstat(tmp_path / "a").st_ino
    with pytest.raises(StoreError, match=rf"{tmp_path}/a (failed: |is not what it was)"):
        store.publish("a", b"1", expect, sync=False)
    assert os.lstat(tmp_path / "a").st_ino == before
    assert not [name for name in os.listdir(tmp_path) if ".tmp-" in name]


def test_a_device_is_not_even_opened(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").symlink_to("/dev/zero")
    opened: list[object] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *args, **more: opened.append(path) or real(path, *args, **more))
    with pytest.raises(UnreadableFileError):
        store.read("a")
    assert not opened


def test_one_that_takes_a_files_place_is_not_waited_for(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "file", b"1")
    os.mkfifo(tmp_path / "a")
    facts = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda *_, **__: facts)
    with pytest.raises(UnreadableFileError, match="FIFO"):
        store.read("a")


def test_a_lease_is_waited_for(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "a", b"1")
    real = os.open

    def leased(path: str, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_NONBLOCK:
            raise BlockingIOError
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", leased)
    assert store.read("a") == b"1"


class TestLinks:
    """`archive` belongs to others; links in the store lead there."""

    @pytest.fixture
    def archive(self, tmp_path: Path) -> Path:
        archive = tmp_path / "archive"
        archive.mkdir()
        (archive / "kept").write_bytes(b"1")
        return archive

    @pytest.fixture
    def run(self, tmp_path: Path, archive: Path) -> LocalStore:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "link").symlink_to(archive)
        (tmp_path / "run" / "file").symlink_to(archive / "kept")
        return LocalStore(tmp_path / "run")

    def test_what_is_behind_one_is_read_and_nothing_else(self, run: LocalStore, archive: Path) -> None:
        assert run.read("link/kept") == b"1"
        assert run.stat("link/kept") is not None
        for call in (
            lambda: run.delete("link/kept"),
            lambda: run.create("link/new", 1),
            lambda: run.create("link/deep/new", 1),
            lambda: run.publish("link/kept", b"2", Expect.ANY, sync=False),
            lambda: run.publish("link/new", b"2", Expect.ABSENT, sync=True),
        ):
            with pytest.raises(StoreError, match=rf"/run/link is a symbolic link to {archive}, and .* Remove the link"):
                call()
        assert [(each.name, each.read_bytes()) for each in archive.iterdir() if each.is_file()] == [("kept", b"1")]

    def test_one_in_the_place_of_an_object_goes_itself(self, run: LocalStore, archive: Path) -> None:
        run.publish("file", b"2", Expect.ANY, sync=True)
        assert (run.read("file"), (archive / "kept").read_bytes()) == (b"2", b"1")
        assert run.is_link("link")
        assert not run.is_link("file")
        run.delete("link")
        assert not run.is_link("link")
        assert (archive / "kept").read_bytes() == b"1"

    def test_the_root_may_be_one(self, tmp_path: Path, archive: Path) -> None:
        (tmp_path / "short").symlink_to(archive)
        store = LocalStore(tmp_path / "short")
        put(store, "receipts/a", b"2")
        store.publish("b", b"3", Expect.ABSENT, sync=True)
        assert store.list() == ["b", "kept", "receipts/a"]
        for name in store.list():
            store.delete(name)
        assert not any(archive.iterdir())

    def test_one_that_takes_a_folders_place_while_something_is_removed(
        self, tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(LocalStore(tmp_path), "run/step/kept", b"2")
        real = os.unlink

        def swapped(name: str, *, dir_fd: int | None = None) -> None:
            os.rename(tmp_path / "run/step", tmp_path / "run/moved")
            (tmp_path / "run/step").symlink_to(archive)
            real(name, dir_fd=dir_fd)

        monkeypatch.setattr(os, "unlink", swapped)
        LocalStore(tmp_path / "run").delete("step/kept")
        assert (archive / "kept").read_bytes() == b"1"
        assert not (tmp_path / "run/moved/kept").exists()

    def test_folders_that_may_only_be_passed(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "root")
        put(store, "dir/a", b"1")
        (tmp_path / "root").chmod(stat.S_IWUSR | stat.S_IXUSR)
        store.delete("dir/a")
        (tmp_path / "root").chmod(stat.S_IRWXU)
        assert store.list() == []


class TestSizes:
    def test_more_than_any_record_has(self, store: LocalStore, tmp_path: Path) -> None:
        with open(tmp_path / "a", "wb") as file:
            file.truncate(50 << 30)
        for read in (read_record, read_whole):
            with pytest.raises(ManifestError, match=r"/a has 53,687,091,200 bytes, more than any such file"):
                read(store, "a")

    def test_large_and_something_else(self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with open(tmp_path / "a", "wb") as file:
            file.truncate(MAX_RECORD_BYTES)
        monkeypatch.setattr(LocalStore, "read", lambda *_: pytest.fail("it is read whole"))
        with pytest.raises(ManifestError, match=r"/a does not begin like a record"):
            read_record(store, "a")

    def test_a_large_record_is_read(self, store: LocalStore) -> None:
        data = RECORD_HEAD + bytes(3 << 20)
        put(store, "a", data)
        assert read_record(store, "a") == data
        assert begins_like_record(store, "a")
        put(store, "b", data[: len(RECORD_HEAD) - 1])
        assert not begins_like_record(store, "b")
        for read in (read_record, read_whole, begins_like_record):
            with pytest.raises(MissingFileError):
                read(store, "absent")


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.EIO, UnreadableFileError), (errno.EACCES, UnreadableFileError), (errno.EMFILE, StoreError)],
)
def test_errors_of_this_process_are_not_the_files(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, kind: type
) -> None:
    """A load goes on to an older checkpoint where a file cannot be read, but not for want of descriptors."""
    put(store, "a", b"1")

    def failing(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(syscalls, "read_all", failing)
    with pytest.raises(StoreError) as caught:
        store.read("a")
    assert type(caught.value) is kind
