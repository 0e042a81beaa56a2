"""Names below a directory, to write and remove: a link on the way is refused, not followed. Raises `OSError`.

A link in a checkpoint or a run may lead to files of others. To read them through it does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from hyper_ckpt.storage.syscalls import ThroughLinkError

_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC  # O_PATH: to pass is enough


def refuse_links(root: str, name: str) -> None:
    """Looks at the directories between `root` and a name, as they are now.

    Raises:
        ThroughLinkError: one is a link.
    """
    path = root
    for part in name.split("/")[:-1]:
        path = os.path.join(path, part)
        if os.path.islink(path):
            raise ThroughLinkError(path)


def remove(root: str, name: str) -> bool:
    """Removes a file, or a link that has its name, and the directories between it and `root` that are empty then. A
    directory that becomes a link at any moment is not followed.

    Returns:
        Whether there was one.

    Raises:
        ThroughLinkError: a directory between the two is a link.
    """
    *parents, last = name.split("/")
    try:
        with _opened_parents(root, name) as folders:
            os.unlink(last, dir_fd=folders[-1])
            with contextlib.suppress(OSError):  # not empty, or not ours to remove: it stays
                for parent, folder in zip(reversed(parents), reversed(folders[:-1]), strict=True):
                    os.rmdir(parent, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except OSError as error:
        # A read-only file system says so before it looks whether there is a file.
        if error.errno != errno.EROFS or os.path.lexists(os.path.join(root, name)):
            raise
        return False
    return True


@contextlib.contextmanager
def _opened_parents(root: str, name: str) -> Iterator[list[int]]:
    """The directories from `root` to the one that holds `name`, open. Only `root` itself may be a link."""
    folders: list[int] = []
    try:
        folders.append(os.open(root, _DIRECTORY))
        path = root
        for part in name.split("/")[:-1]:
            path = os.path.join(path, part)
            folders.append(_open_folder(folders[-1], part, path))
        yield folders
    finally:
        for folder in folders:
            os.close(folder)


def _open_folder(above: int, part: str, path: str) -> int:
    try:
        return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and _is_link(part, above):
            raise ThroughLinkError(path) from None
        raise


def _is_link(part: str, above: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(part, dir_fd=above, follow_symlinks=False).st_mode)
    except OSError:
        return False
