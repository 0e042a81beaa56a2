"""What the system may refuse at any place, since Python and frameworks import modules when these are first used."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from hyper_ckpt.errors import CheckpointError, StoreError

_REMEDIES = {
    errno.EMFILE: "Raise the limit of open files (ulimit -n), and call it again",
    errno.ENFILE: "The system as a whole has too many files open: close some, and call it again",
    errno.ENOMEM: "Free some memory, and call it again",
    errno.EIO: "Look at the disk that holds Python's packages, and call it again",
}
_FILES_OF_IMPORTS = 8


@contextlib.contextmanager
def system_errors(doing: str) -> Iterator[None]:
    """Whatever is refused inside for want of open files or memory, or since a disk fails, is a StoreError.

    Args:
        doing: for its text, e.g. "saving to /a".
    """
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ImportError) as error:
        code = refusal(error)
        if code is None:
            raise
        raise StoreError(f"{doing} failed: {error}. {_REMEDIES[code]}") from error


def refusal(error: BaseException) -> int | None:
    """Which of these errors of the system `error` is or comes of; None if of none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _REMEDIES:
            return seen.errno
        if isinstance(seen, ImportError):  # of a shared library: the loader says it in words only
            found = next((code for code in _REMEDIES if os.strerror(code) in str(seen)), None)
            if found is not None:
                return found
        seen = seen.__cause__ or seen.__context__
    return None


def require_files() -> None:
    """Before many modules are looked for: importlib takes a directory that it cannot open for an empty one, and
    remembers that.

    Raises:
        OSError: a few files cannot be opened at once.
    """
    opened: list[int] = []
    try:
        for _ in range(_FILES_OF_IMPORTS):
            opened.append(os.open(os.devnull, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
    finally:
        for fd in opened:
            os.close(fd)
