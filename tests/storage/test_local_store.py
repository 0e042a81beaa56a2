"""What only a store of files can do or suffer: full disks, read-only mounts, missing system calls, kills."""

import ctypes
import errno
import fcntl
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_ckpt.contracts.store import Expect
from hyper_ckpt.errors import CheckpointReplacedError, FileSizeError, MissingFileError, StoreError, UnreadableFileError
from hyper_ckpt.storage import syscalls
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.names import is_temporary
from hyper_ckpt.testing.conformance.store import get, put

MIB = 1 << 20


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk))
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A root with an object "dir/a", on a read-only mount: permissions alone don't stop the superuser."""
    root = tmp_path / "root"
    put(LocalStore(root), "dir/a", b"0123456789")
    mount("--bind", str(root), str(root))
    mount("-o", "remount,ro,bind", str(root))
    yield root
    subprocess.run(["umount", str(root)], check=True)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


@pytest.fixture
def open_files() -> Iterator[None]:
    """Fails a test that leaves descriptors open."""
    if not os.path.isdir("/proc/self/fd"):
        yield
        return
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def failing(code: int):
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def test_the_url_is_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("some/../root")
    monkeypatch.chdir("/")
    assert store.url == str(tmp_path / "root")
    assert pickle.loads(pickle.dumps(store)).url == store.url
    assert not os.path.exists(store.url)
    with pytest.raises(StoreError, match="empty"):
        LocalStore("")


class TestFullDisk:
    def test_create_makes_room_or_nothing(self, small_disk: Path) -> None:
        store = LocalStore(small_disk / "root")
        sink = store.create("a", 3 * MIB)
        with pytest.raises(
            StoreError, match=r"root/b failed: No space.*\(2,097,152 .* wanted\), [\d,]+ bytes are free"
        ):
            store.create("b", 2 * MIB)
        sink.write_at(0, bytes(3 * MIB))
        sink.close(sync=True)
        assert store.list() == ["a"]

    def test_room_is_checked_where_it_cannot_be_reserved(
        self, small_disk: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(syscalls, "_native_fallocate", lambda: None)
        store = LocalStore(small_disk)
        with pytest.raises(StoreError, match="No space"):
            store.create("a", 5 * MIB)
        assert store.list() == []

    def test_a_write_that_finds_no_room(self, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(syscalls, "_native_fallocate", lambda: None)
        store = LocalStore(small_disk)
        first, second = store.create("a", 3 * MIB), store.create("b", 3 * MIB)
        first.write_at(0, bytes(3 * MIB))
        with pytest.raises(StoreError, match=r"disk/b failed: No space.*\(3,145,728 bytes at 0\).*bytes are free"):
            second.write_at(0, bytes(3 * MIB))
        second.abort()
        first.close(sync=True)
        assert store.list() == ["a"]

    def test_publish(self, small_disk: Path) -> None:
        store = LocalStore(small_disk)
        store.publish("m", b"old", Expect.ABSENT, sync=True)
        with pytest.raises(StoreError, match="No space"):
            store.publish("m", bytes(5 * MIB), Expect.ANY, sync=True)
        assert store.list() == ["m"]
        assert store.read("m") == b"old"


class TestPreallocation:
    def test_blocks_are_reserved(self, store: LocalStore) -> None:
        if syscalls._native_fallocate() is None:
            pytest.skip("no fallocate here")
        sink = store.create("a", MIB)
        facts = os.stat(os.path.join(store.url, "a"))
        sink.abort()
        assert facts.st_size == MIB
        assert facts.st_blocks * 512 >= MIB

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
    def test_without_fallocate(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        def native(fd: int, mode: int, offset: int, size: int) -> int:
            ctypes.set_errno(code)
            return -1

        monkeypatch.setattr(syscalls, "_native_fallocate", lambda: native)
        put(store, "a", bytes(MIB))
        assert store.read("a") == bytes(MIB)

    def test_interrupted_and_failed(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        codes = [errno.EIO, errno.EINTR, errno.EINTR]

        def native(fd: int, mode: int, offset: int, size: int) -> int:
            ctypes.set_errno(codes.pop())
            return -1

        monkeypatch.setattr(syscalls, "_native_fallocate", lambda: native)
        with pytest.raises(StoreError, match="Input/output error"):
            store.create("a", 1)
        assert not codes
        assert store.list() == []


@pytest.mark.usefixtures("open_files")
class TestErrors:
    def test_partial_reads_and_writes_go_on(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        pwrite, preadv = os.pwrite, os.preadv
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:5]], offset))
        data = os.urandom(100)
        put(store, "a", data)
        assert store.read("a") == data
        buffers = [bytearray(13) for _ in range(7)]
        store.read_into("a", [(9 + 13 * i, 13) for i in range(7)], [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == data[9:]
        with pytest.raises(FileSizeError):
            get(store, "a", 90, 11)

    def test_calls_are_bounded(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(syscalls, "_MAX_BYTES_PER_CALL", 10)
        monkeypatch.setattr(syscalls, "_MAX_BUFFERS_PER_CALL", 3)
        seen, pwrite, preadv = [], os.pwrite, os.preadv
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: seen.append([len(data)]) or pwrite(fd, data, at))
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: seen.append(views) or preadv(fd, views, at))
        data = os.urandom(64)
        put(store, "a", data)
        lengths = [25, 0, 3, 1, 1, 1, 1, 9, 2, 21]
        buffers = [bytearray(length) for length in lengths]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        store.read_into("a", list(zip(starts, lengths, strict=True)), [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == data
        assert all(len(call) <= 3 and sum(getattr(view, "nbytes", view) for view in call) <= 10 for call in seen)

    def test_a_failing_write_names_file_and_cause(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        sink = store.create("dir/a", 4)
        monkeypatch.setattr(os, "pwrite", failing(errno.EIO))
        with pytest.raises(StoreError, match=r"writing .*/root/dir/a failed: Input/output error") as caught:
            sink.write_at(0, b"1234")
        assert isinstance(caught.value.__cause__, OSError)
        sink.abort()

    def test_a_write_without_progress_ends(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        sink = store.create("a", 4)
        monkeypatch.setattr(os, "pwrite", lambda *args: 0)
        with pytest.raises(StoreError):
            sink.write_at(0, b"1234")
        sink.abort()

    def test_a_failing_sync_fails_the_close(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        sink = store.create("a", 0)
        monkeypatch.setattr(syscalls, "sync_file", failing(errno.EIO))
        with pytest.raises(StoreError, match="completing"):
            sink.close(sync=True)
        sink.abort()
        assert store.list() == []

    def test_a_failing_publish_leaves_nothing(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        etag = store.publish("m", b"old", Expect.ABSENT, sync=False)
        for function, expect in [("pwrite", Expect.ANY), ("link", Expect.ABSENT), ("replace", etag), ("stat", etag)]:
            with monkeypatch.context() as patch:
                patch.setattr(os, function, failing(errno.EIO))
                with pytest.raises(StoreError, match="publishing"):
                    store.publish("n" if expect is Expect.ABSENT else "m", b"new", expect, sync=False)
        assert store.list() == ["m"]
        assert store.read("m") == b"old"

    def test_an_abandoned_sink_gives_its_descriptor_back(self, store: LocalStore) -> None:
        sink = store.create("a", 4)
        del sink
        assert store.list() == ["a"]

    def test_files_and_directories_in_the_way(self, store: LocalStore) -> None:
        put(store, "dir/a", b"1")
        assert store.stat("dir") is None
        assert store.stat("dir/a/b") is None
        store.delete("dir/a/b")
        for call in [
            lambda: put(store, "dir/a/b", b"2"),
            lambda: store.read("dir/a/b"),
            lambda: get(store, "dir", 0, 1),
            lambda: store.publish("dir", b"2", Expect.ANY, sync=False),
            lambda: store.create("x" * 300, 1),
            LocalStore(os.path.join(store.url, "dir/a")).list,
        ]:
            with pytest.raises(StoreError, match=str(store.url)):
                call()
        with pytest.raises(UnreadableFileError, match="a directory lies there"):
            store.publish("dir", b"2", Expect.ABSENT, sync=False)
        assert store.list() == ["dir/a"]


class TestReadOnly:
    def test_reading(self, read_only: Path) -> None:
        store = LocalStore(read_only)
        assert store.list() == ["dir/a"]
        assert store.read("dir/a") == b"0123456789"
        assert get(store, "dir/a", 3, 2) == b"34"
        info = store.stat("dir/a")
        assert info is not None
        assert info.size == 10
        store.delete("gone")

    def test_writing(self, read_only: Path) -> None:
        store = LocalStore(read_only)
        etag = store.stat("dir/a").etag
        for call in [
            lambda: store.create("new", 1),
            lambda: store.create("new/dir/b", 1),
            lambda: store.delete("dir/a"),
            lambda: store.publish("m", b"1", Expect.ABSENT, sync=False),
            lambda: store.publish("dir/a", b"1", etag, sync=False),
        ]:
            with pytest.raises(StoreError, match=r"Read-only file system.* Mount .* for writing"):
                call()

    def test_permissions(self, store: LocalStore) -> None:
        put(store, "dir/a", b"1")
        os.chmod(os.path.join(store.url, "dir"), 0o500)
        if os.geteuid() == 0:
            pytest.skip("permissions don't stop the superuser")
        with pytest.raises(StoreError, match="Check the permissions"):
            put(store, "dir/b", b"2")


class TestPublish:
    @pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
    def test_without_links(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        monkeypatch.setattr(os, "link", failing(code))
        with pytest.warns(UserWarning, match="no hard links .* unnoticed"):
            store.publish("m", b"1", Expect.ABSENT, sync=True)
        store.publish("n", b"2", Expect.ABSENT, sync=True)  # warns once
        with pytest.raises(CheckpointReplacedError):
            store.publish("m", b"3", Expect.ABSENT, sync=True)
        assert store.list() == ["m", "n"]
        assert store.read("m") == b"1"

    @pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF])
    def test_without_locks(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        etag = store.publish("m", b"1", Expect.ABSENT, sync=True)
        monkeypatch.setattr(fcntl, "flock", failing(code))
        with pytest.warns(UserWarning, match="no file locks .* unnoticed"):
            new = store.publish("m", b"2", etag, sync=True)
        with pytest.raises(CheckpointReplacedError):
            store.publish("m", b"3", etag, sync=True)
        store.publish("m", b"4", new, sync=True)
        assert store.list() == ["m"]

    def test_a_warning_made_an_error_leaves_nothing(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
        with pytest.raises(UserWarning):
            store.publish("m", b"1", Expect.ABSENT, sync=False)
        assert store.list() == []

    @pytest.mark.parametrize("function", ["link", "replace"])
    def test_an_answer_that_was_lost(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
        """A file server did what was asked; its client repeats the request and hears that it can't be done."""
        expect = Expect.ABSENT if function == "link" else store.publish("m", b"old", Expect.ABSENT, sync=False)
        real = getattr(os, function)

        def twice(source: str, target: str) -> None:
            real(source, target)
            real(source, target)

        monkeypatch.setattr(os, function, twice)
        store.publish("m", b"new", expect, sync=False)
        assert store.read("m") == b"new"
        assert store.list() == ["m"]

    def test_a_lock_that_is_held_is_waited_for(self, store: LocalStore) -> None:
        etag = store.publish("m", b"old", Expect.ABSENT, sync=False)
        script = (
            "import fcntl, os, sys, time\n"
            "path = sys.argv[1]\n"
            "fd = os.open(path, os.O_RDWR)\n"
            "fcntl.flock(fd, fcntl.LOCK_EX)\n"
            "print('locked', flush=True)\n"
            "time.sleep(0.3)\n"
            "open(path + '.other', 'wb').write(b'other')\n"
            "os.replace(path + '.other', path)\n"
        )
        command = [sys.executable, "-c", script, os.path.join(store.url, "m")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(CheckpointReplacedError):
                store.publish("m", b"mine", etag, sync=False)
        assert store.read("m") == b"other"

    @pytest.mark.parametrize("moment", ["write_all", "sync_file", "link", "replace"])
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_killed_on_the_way(self, store: LocalStore, moment: str, overwrite: bool) -> None:
        """Dies before the system call: the name holds the old bytes; what is left can be told from them."""
        etag = store.publish("m", b"old", Expect.ABSENT, sync=False) if overwrite else None
        script = (
            "import os, signal, sys\n"
            "from hyper_ckpt.contracts.store import Expect\n"
            "from hyper_ckpt.storage import syscalls\n"
            "from hyper_ckpt.storage.local_store import LocalStore\n"
            "root, moment, etag = sys.argv[1:]\n"
            "die = lambda *args: os.kill(os.getpid(), signal.SIGKILL)\n"
            "setattr(os if hasattr(os, moment) else syscalls, moment, die)\n"
            "LocalStore(root).publish('m', b'new', etag or Expect.ABSENT, sync=True)\n"
        )
        done = subprocess.run([sys.executable, "-c", script, store.url, moment, etag or ""], check=False)
        reached = moment not in ("link", "replace") or moment == ("replace" if overwrite else "link")
        assert done.returncode == (-9 if reached else 0)
        left = [name for name in store.list() if name != "m"]
        assert len(left) == reached
        assert all(is_temporary(name) and name.startswith("m.") for name in left)
        if reached:
            assert (store.stat("m") is not None) == overwrite
            if overwrite:
                assert store.read("m") == b"old"
        else:
            assert store.read("m") == b"new"


class TestSync:
    @pytest.fixture
    def synced(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        seen: list[str] = []
        real = syscalls.sync_directory
        monkeypatch.setattr(syscalls, "sync_directory", lambda path: seen.append(path) or real(path))
        return seen

    def test_new_directories_and_their_parents(self, tmp_path: Path, synced: list[str]) -> None:
        store = LocalStore(tmp_path / "x" / "root")
        put(store, "a", b"1", sync=True)
        put(store, "dir/sub/b", b"1", sync=True)
        store.sync()
        root = tmp_path / "x" / "root"
        assert synced == [str(p) for p in sorted([tmp_path, tmp_path / "x", root, root / "dir", root / "dir" / "sub"])]
        synced.clear()
        store.sync()
        assert synced == [str(root)]

    def test_publish_syncs_what_it_made(self, tmp_path: Path, synced: list[str]) -> None:
        store = LocalStore(tmp_path / "root")
        store.publish("m", b"1", Expect.ABSENT, sync=False)
        assert synced == []
        store.publish("dir/m", b"1", Expect.ABSENT, sync=True)
        assert synced == [str(tmp_path), str(tmp_path / "root"), str(tmp_path / "root" / "dir")]

    def test_after_a_failure_it_is_still_to_be_done(
        self, tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path / "root")
        put(store, "dir/a", b"1")
        with monkeypatch.context() as patch:
            patch.setattr(syscalls, "sync_directory", failing(errno.EIO))
            with pytest.raises(StoreError, match="syncing"):
                store.sync()
        store.sync()
        assert str(tmp_path / "root" / "dir") in synced

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
    def test_directories_that_cannot_be_synced(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        put(store, "a", b"1")
        monkeypatch.setattr(os, "fsync", failing(code))
        store.sync()

    def test_a_directory_that_is_gone(self, store: LocalStore) -> None:
        put(store, "dir/a", b"1")
        store.delete("dir/a")
        assert not os.path.exists(os.path.join(store.url, "dir"))
        store.sync()


def test_a_file_that_is_gone_is_told_from_other_errors(store: LocalStore) -> None:
    put(store, "a", b"1")
    os.unlink(os.path.join(store.url, "a"))
    with pytest.raises(MissingFileError, match="does not exist"):
        store.read("a")


def test_links_are_followed_and_strangers_are_listed(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"1")
    put(store, "a", b"1")
    os.symlink(tmp_path / "elsewhere", os.path.join(store.url, "link"))
    assert store.list() == ["a", "link"]
    assert store.read("link") == b"1"
