"""A directory as a byte store: local disks, and shared file systems mounted like one."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from hyper_ckpt.contracts.store import ByteStore, Expect, ObjectInfo, ReadAt, Sink
from hyper_ckpt.errors import FileSizeError
from hyper_ckpt.storage import atomic, below, syscalls
from hyper_ckpt.storage.buffers import runs
from hyper_ckpt.storage.local_sink import LocalSink
from hyper_ckpt.storage.names import check_name, is_name, temporary_name
from hyper_ckpt.storage.open_files import OpenFiles
from hyper_ckpt.storage.paths import local_path
from hyper_ckpt.storage.syscalls import naming

# Another process may remove an emptied directory between our making it and our using it.
_ATTEMPTS = 10
_MOST_OPEN = 32
_Folders = list[str]


class LocalStore(ByteStore):
    """Objects are files below a directory, which need not exist before the first write.

    Links are followed to read. To write or remove, only the root itself may be one, or what stands above it.

    Args:
        path: the root, or a `file://` URL of it, see `hyper_ckpt.storage.paths`. A relative one is taken from the
            current directory, now and for good.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.url = local_path(path)
        self._unsynced: set[str] = set()  # directories with names that may not survive a power failure
        self._unsynced_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._files = OpenFiles(_MOST_OPEN)
        self._warned = False

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def __reduce__(self) -> tuple[Callable[[str], LocalStore], tuple[str]]:
        return LocalStore, (self.url,)

    def create(self, name: str, size: int) -> Sink:
        path = self._path(name)
        with naming("creating", path, f" ({size:,} bytes wanted)"), self._made_folders() as made:
            fd = self._open_new(name, made)
            try:
                syscalls.preallocate(fd, size)
            except BaseException:
                os.close(fd)
                syscalls.unlink_quietly(path)
                raise
        return LocalSink(path, fd, size)

    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        path = self._path(name)
        with naming("reading", path), self._files.opened(path) as fd:
            for start, views in runs(ranges, buffers):
                _read_exactly(path, fd, start, views)

    def reader(self, name: str) -> AbstractContextManager[ReadAt]:
        overridden = type(self).read_into is not LocalStore.read_into
        return super().reader(name) if overridden else self._reader(self._path(name))

    @contextlib.contextmanager
    def _reader(self, path: str) -> Iterator[ReadAt]:
        with contextlib.ExitStack() as stack:
            with naming("reading", path):
                fd = stack.enter_context(self._files.opened(path))
            yield functools.partial(os.preadv, fd)

    def reading(self) -> AbstractContextManager[None]:
        return self._files.kept()

    def read(self, name: str) -> bytes:
        # One open file throughout: an object that is replaced meanwhile is still read whole.
        path = self._path(name)
        with naming("reading", path), _opened(path) as fd:
            data = bytearray(os.fstat(fd).st_size)
            _read_exactly(path, fd, 0, [memoryview(data)])
        return bytes(data)

    def list(self, prefix: str = "") -> list[str]:
        names = []
        root, folder_of_prefix = os.path.join(self.url, ""), prefix.rpartition("/")[0]
        if folder_of_prefix and not (is_name(folder_of_prefix) and os.path.isdir(root + folder_of_prefix)):
            return []
        # Only below the folder of the prefix: a run may have thousands of others.
        for folder, _, files in os.walk(root + folder_of_prefix, onerror=_refuse_unless_gone):
            parent = os.path.join(folder, "")[len(root) :]
            names += [parent + file for file in files]
        return sorted(name for name in names if name.startswith(prefix))

    def delete(self, name: str) -> None:
        path = self._path(name)
        with naming("removing", path):
            if below.remove(self.url, name):
                self._note_unsynced(os.path.dirname(path))

    def stat(self, name: str) -> ObjectInfo | None:
        path = self._path(name)
        with naming("looking up", path):
            facts = atomic.facts_at(path)
            if facts is None or stat.S_ISDIR(facts.st_mode):
                return None
            syscalls.check_regular(facts.st_mode)
        return ObjectInfo(facts.st_size, atomic.etag_of(facts), facts.st_mtime)

    def is_link(self, name: str) -> bool:
        """Whether what has this name below the root is a symbolic link, to an object or a directory."""
        return os.path.islink(os.path.join(self.url, name))

    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        """See `ByteStore.publish`. Where only the sync of directories fails, the object is in place all the same."""
        path, beside = self._path(name), temporary_name(name)
        temporary = self._path(beside)
        with naming("publishing", path), self._made_folders() as made:
            try:
                etag = self._write_whole(beside, data, sync, made)
                if expect is Expect.ABSENT:
                    atomic.link_new(temporary, path, self._warn_unguarded)
                else:
                    atomic.replace(temporary, path, expect, self._warn_unguarded)
            finally:
                syscalls.unlink_quietly(temporary)
        if sync:
            self.sync()
        return etag

    def sync(self) -> None:
        # One at a time: a thread that finds nothing left to sync must not return before it is synced.
        with self._sync_lock:
            with self._unsynced_lock:
                folders, self._unsynced = self._unsynced | {self.url}, set()
            try:
                for folder in sorted(folders):
                    with naming("syncing", folder):
                        syscalls.sync_directory(folder)
            except BaseException:
                with self._unsynced_lock:
                    self._unsynced |= folders
                raise

    def _path(self, name: str) -> str:
        return os.path.join(self.url, check_name(name))

    def missing_folders(self) -> int:
        folder, missing = self.url, 0
        while not os.path.isdir(folder) and folder != os.path.dirname(folder):
            folder, missing = os.path.dirname(folder), missing + 1
        return missing

    def remove_folders(self, most: int) -> None:
        if most < 1:
            return
        with contextlib.suppress(OSError):  # not empty, or not ours to remove: it stays
            for folder, _, _ in os.walk(self.url, topdown=False):
                os.rmdir(folder)
            folder = self.url
            for _ in range(most - 1):
                folder = os.path.dirname(folder)
                os.rmdir(folder)

    @contextlib.contextmanager
    def _made_folders(self) -> Iterator[_Folders]:
        """A list for directories that are made inside; if that fails, they are removed."""
        made: _Folders = []
        try:
            yield made
        except BaseException:
            with contextlib.suppress(OSError):  # another saver put something there
                for folder in reversed(made):
                    os.rmdir(folder)
            raise

    def _open_new(self, name: str, made: _Folders) -> int:
        """Opens a new file, in directories made on the way and added to `made`, and notes what is to be synced."""
        path = self._path(name)
        folder = os.path.dirname(path)
        below.refuse_links(self.url, name)
        attempts = _ATTEMPTS
        while True:
            self._make_directories(folder, made)
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                attempts -= 1
                if not attempts:
                    raise
            else:
                self._note_unsynced(folder)
                return fd

    def _make_directories(self, folder: str, made: _Folders) -> None:
        missing = []
        while not os.path.isdir(folder) and folder != os.path.dirname(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for each in reversed(missing):
            try:
                os.mkdir(each)
            except (FileExistsError, FileNotFoundError):
                continue  # somebody else made it, or removed the one above: the open that follows will tell
            made.append(each)
            self._note_unsynced(os.path.dirname(each))

    def _note_unsynced(self, folder: str) -> None:
        with self._unsynced_lock:
            self._unsynced.add(folder)

    def _write_whole(self, name: str, data: bytes, sync: bool, made: _Folders) -> str:
        """Writes a new file and returns its etag."""
        fd = self._open_new(name, made)
        try:
            syscalls.write_all(fd, 0, memoryview(data))
            if sync:
                syscalls.sync_file(fd)
        finally:
            os.close(fd)
        return atomic.etag_of(os.stat(self._path(name)))  # after the close, when a file server has set its times

    def _warn_unguarded(self, what: str, cause: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the file system of {self.url} has no {what} ({cause.strerror}): two jobs that save to this path at the "
            "same time would go unnoticed. Let only one job save to it.",
            stacklevel=2,
        )


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = syscalls.open_regular(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_exactly(path: str, fd: int, start: int, views: Sequence[memoryview]) -> None:
    wanted = sum(view.nbytes for view in views)
    got = syscalls.read_all(fd, start, views)
    if got < wanted:
        raise FileSizeError(
            f"{path} ends early: {wanted:,} bytes are wanted from byte {start:,} on, {got:,} are there. "
            "It was cut short or replaced since it was saved; load another checkpoint."
        )


def _refuse_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise syscalls.store_error("listing", str(error.filename), error) from error
