"""Puts a finished file in place of a name: exclusively, or against what was there. Raises `OSError`.

Where a file system has neither hard links nor locks, a check followed by a rename does instead, and `unguarded`
is called: two processes that do this at the same time won't notice each other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator

from hyper_ckpt.contracts.store import Expect
from hyper_ckpt.errors import CheckpointReplacedError
from hyper_ckpt.storage.syscalls import UNSUPPORTED, IrregularFileError, open_regular

Unguarded = Callable[[str, OSError], None]

_NO_LINKS = UNSUPPORTED | {errno.EPERM}
_NO_LOCKS = UNSUPPORTED | {errno.ENOLCK, errno.EBADF, errno.EPERM, errno.EINVAL}


def facts_at(path: str) -> os.stat_result | None:
    """What stat(2) says, None if nothing is there."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def etag_of(facts: os.stat_result) -> str:
    """A token that links and renames leave as it is, and that no other content of the same name has."""
    return f"{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_size:x}"


def link_new(temporary: str, path: str, unguarded: Unguarded) -> None:
    """Names the file `path` as well if nothing is there.

    Raises:
        CheckpointReplacedError: a file is.
        IrregularFileError: something else is.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if _same_file(temporary, path):
            return  # a network file system did it, lost the answer, and tried again
        if error.errno == errno.EEXIST:
            _refuse_irregular(path)
            raise _replaced(path) from None
        if error.errno not in _NO_LINKS:
            raise
        unguarded("hard links", error)
        if os.path.lexists(path):
            _refuse_irregular(path)
            raise _replaced(path) from None
        os.replace(temporary, path)


def replace(temporary: str, path: str, expect: Expect | str, unguarded: Unguarded) -> None:
    """Renames the file to `path` if what is there has the etag `expect`, or whatever it is with `Expect.ANY`.

    Raises:
        CheckpointReplacedError: something else is there, or nothing.
        IrregularFileError: what is there is no regular file.
    """
    with _locked(path, unguarded):
        if expect is not Expect.ANY and _etag_at(path) != expect:
            raise _replaced(path)
        etag = _etag_at(temporary)
        try:
            os.replace(temporary, path)
        except OSError:
            if _etag_at(path) != etag:  # else as in `link_new`
                raise


@contextlib.contextmanager
def _locked(path: str, unguarded: Unguarded) -> Iterator[None]:
    """Keeps away all others that want to replace the file at `path`.

    The lock is on that file itself. On the directory it would fail on NFS, which locks only what is open for
    writing, and a lock file would stay behind.
    """
    fd = _lock_current(path, unguarded)
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


def _lock_current(path: str, unguarded: Unguarded) -> int | None:
    """Locks the file at `path`; None if there is nothing to lock."""
    while True:
        try:
            fd = _open_for_lock(path)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Who held the lock before may have replaced the file: then this one is out of use.
            current = _etag_at(path) == etag_of(os.fstat(fd))
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_LOCKS:
                raise
            unguarded("file locks", error)
            return None
        except BaseException:  # e.g. Ctrl-C while waiting
            os.close(fd)
            raise
        if current:
            return fd
        os.close(fd)


def _open_for_lock(path: str) -> int:
    try:
        return open_regular(path, os.O_RDWR)
    except PermissionError:  # somebody else's file in a shared directory
        return open_regular(path)


def _etag_at(path: str) -> str | None:
    facts = facts_at(path)
    return None if facts is None else etag_of(facts)


def _refuse_irregular(path: str) -> None:
    """Raises `IrregularFileError` if what lies there is no file, nor a link to one."""
    with contextlib.suppress(FileNotFoundError):
        if not os.path.isfile(path):
            raise IrregularFileError(os.lstat(path).st_mode)


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _replaced(path: str) -> CheckpointReplacedError:
    return CheckpointReplacedError(
        f"{path} is not what it was when this save began: another saver published there meanwhile. "
        "Give every job its own path."
    )
