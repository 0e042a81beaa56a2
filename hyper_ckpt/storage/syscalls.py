"""System calls that Python leaves half done: whole reads and writes, room in advance, durable names.

All of them raise `OSError`; `naming` turns one into an error that says what to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Callable, Iterator, Sequence

from hyper_ckpt.errors import CheckpointError, MissingFileError, StoreError, UnreadableFileError

# Linux moves at most 2 GiB - 4 KiB per call and says so; macOS refuses more than 2 GiB - 1.
_MAX_BYTES_PER_CALL = 1 << 30
_MAX_BUFFERS_PER_CALL = 1024

# How file systems say that they don't have an operation at all.
UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_PERMISSIONS = "Check the permissions of the file and of the directories above it."
_REMEDIES = {
    errno.ENOSPC: "Free some space, or save elsewhere.",
    errno.EDQUOT: "The quota is used up: free some space, or save elsewhere.",
    errno.EFBIG: "The file system does not hold files of this size: save elsewhere.",
    errno.EROFS: "Mount the file system for writing, or save elsewhere.",
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENAMETOOLONG: "Use a shorter path.",
    errno.ENOTDIR: "A file lies where a directory is needed: move it away, or use another path.",
    errno.ENOENT: "A directory above it cannot be made, or was removed meanwhile: look there, or use another path.",
    errno.EEXIST: "Remove it first, or use another path.",
    errno.ELOOP: "A symbolic link leads back to itself: remove it, or use another path.",
}
_MAKING = frozenset({"creating", "writing", "completing", "publishing"})
_REMEDY = "Check the file system and the system log, then try again."

_READING = frozenset({"reading", "looking up", "listing"})
# What is wrong with one file or directory, and not with this process or the whole file system.
_UNREADABLE = frozenset({errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP, errno.ENOTDIR, errno.EBADMSG, errno.ENXIO})

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class IrregularFileError(OSError):
    """What has the name is no regular file: to open it could wait for ever, or change a device."""

    def __init__(self, mode: int) -> None:
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
        super().__init__(f"{kind} lies there, where a file is wanted")


class ThroughLinkError(OSError):
    """A directory on the way to a name is a symbolic link: what is created or removed there could be anybody's."""

    def __init__(self, link: str) -> None:
        try:
            target = f" to {os.readlink(link)}"
        except OSError:
            target = ""
        super().__init__(f"{link} is a symbolic link{target}, and through one nothing is written or removed")


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """Opens a file that is there; through a link, too.

    Raises:
        IrregularFileError: it is none. A FIFO is not waited for, and a device not opened.
        OSError: it cannot be opened.
    """
    check_regular(os.stat(path).st_mode)
    flags |= os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # a regular file that another process holds a lease on
        fd = os.open(path, flags)
    try:
        check_regular(os.fstat(fd).st_mode)  # it may have been replaced since
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(mode: int) -> None:
    """Raises `IrregularFileError` for the mode of anything but a regular file."""
    if not stat.S_ISREG(mode):
        raise IrregularFileError(mode)


@contextlib.contextmanager
def naming(action: str, path: str, detail: str = "") -> Iterator[None]:
    """Turns an `OSError` into one of ours that names the file, and the room left where that is what failed."""
    try:
        yield
    except CheckpointError:  # some of ours are OSErrors, too
        raise
    except OSError as error:
        raise store_error(action, path, error, detail) from error


def store_error(action: str, path: str, cause: OSError, detail: str = "") -> CheckpointError:
    """The error to raise `from cause` when `action` failed on `path`."""
    if cause.errno == errno.ENOENT and action not in _MAKING:
        return MissingFileError(f"{action} {path} failed: it does not exist. Was it moved or removed?")
    if isinstance(cause, IrregularFileError):
        return UnreadableFileError(f"{action} {path} failed: {cause}. Move it away, or use another path.")
    if isinstance(cause, ThroughLinkError):
        return StoreError(f"{action} {path} failed: {cause}. Remove the link, or name what it leads to.")
    if cause.errno in _NO_ROOM:
        free = free_bytes(path)
        detail += "" if free is None else f", {free:,} bytes are free"
    text = os.strerror(cause.errno) if cause.errno else str(cause)
    kind = UnreadableFileError if action in _READING and cause.errno in _UNREADABLE else StoreError
    return kind(f"{action} {path} failed: {text}{detail}. {_REMEDIES.get(cause.errno or 0, _REMEDY)}")


def free_bytes(path: str) -> int | None:
    """Bytes that may still be written on the file system that holds or will hold `path`; None if it doesn't tell."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None


@functools.cache
def _native_fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2). `os.posix_fallocate` won't do: where the file system lacks it, glibc writes every block."""
    if ctypes.sizeof(ctypes.c_long) < 8:  # off_t may have 32 bits there
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


def preallocate(fd: int, size: int) -> None:
    """Gives an empty file its size and, where the file system can, its blocks."""
    native = _native_fallocate()
    while native is not None and size:
        if native(fd, 0, 0, size) == 0:
            return
        code = ctypes.get_errno()
        if code in UNSUPPORTED:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    facts = os.fstatvfs(fd)
    if facts.f_blocks and facts.f_bavail * facts.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, size)


def write_all(fd: int, offset: int, data: memoryview) -> None:
    """Writes all of `data`, a memoryview of bytes, at `offset`."""
    while data.nbytes:
        written = os.pwrite(fd, data[:_MAX_BYTES_PER_CALL], offset)
        if not written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data, offset = data[written:], offset + written


def read_all(fd: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fills `buffers`, memoryviews of bytes, one after the other from `offset`. Returns bytes read: less at the end."""
    total, first, skip = 0, 0, 0
    while first < len(buffers):
        if skip == buffers[first].nbytes:
            first, skip = first + 1, 0
            continue
        got = os.preadv(fd, _next_buffers(buffers, first, skip), offset + total)
        if not got:
            break
        total += got
        while got:
            step = min(got, buffers[first].nbytes - skip)
            got, skip = got - step, skip + step
            if skip == buffers[first].nbytes:
                first, skip = first + 1, 0
    return total


def _next_buffers(buffers: Sequence[memoryview], first: int, skip: int) -> list[memoryview]:
    """What one call may fill: from `skip` bytes into buffer `first` on."""
    out = [buffers[first][skip : skip + _MAX_BYTES_PER_CALL]]
    room = _MAX_BYTES_PER_CALL - out[0].nbytes
    for buffer in buffers[first + 1 : first + _MAX_BUFFERS_PER_CALL]:
        if buffer.nbytes > room:
            break
        out.append(buffer)
        room -= buffer.nbytes
    return out


def sync_file(fd: int) -> None:
    """Returns when what was written survives a power failure."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)  # on macOS, fsync leaves data in the drive's cache
    if full_sync is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, full_sync)


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable. A directory that is gone needs nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems don't sync directories because their servers always do.
        if error.errno not in UNSUPPORTED | {errno.EINVAL}:
            raise
    finally:
        os.close(fd)


def unlink_quietly(path: str) -> None:
    """Removes a file that is in nobody's way if it stays."""
    with contextlib.suppress(OSError):
        os.unlink(path)
