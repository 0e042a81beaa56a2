"""Files that stay open between reads, a few at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from hyper_ckpt.storage.syscalls import open_regular


@dataclass(eq=False)
class _File:
    fd: int
    users: int = 0


class OpenFiles:
    """Opens files to be read, and keeps them open while `kept` is entered: of more than `most`, the least recently used
    is closed, once nobody reads it.

    Args:
        most: files that stay open.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keepers = 0
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps files open, for as long as any thread is inside."""
        with self._lock:
            self._keepers += 1
        try:
            yield
        finally:
            with self._lock:
                self._keepers -= 1
                self._forget(len(self._files) if not self._keepers else 0)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """The descriptor of a file; outside `kept`, one of its own.

        Raises:
            OSError: it cannot be opened, or is no regular file.
        """
        file = self._take(path)
        try:
            yield file.fd
        finally:
            self._give(path, file)

    def _take(self, path: str) -> _File:
        with self._lock:
            known = self._known(path)
        if known is not None:
            return known
        # Not under the lock: opening may take long on a shared file system, and other threads read meanwhile.
        opened = _File(open_regular(path), 1)
        with self._lock:
            known = self._known(path)
            if known is None:
                if self._keepers:
                    self._files[path] = opened
                return opened
        os.close(opened.fd)
        return known

    def _known(self, path: str) -> _File | None:
        """A file that is open, with one user more. Called under the lock."""
        file = self._files.get(path)
        if file is not None:
            self._files.move_to_end(path)
            file.users += 1
        return file

    def _give(self, path: str, file: _File) -> None:
        with self._lock:
            file.users -= 1
            if file.users:
                return
            if self._files.get(path) is not file:
                os.close(file.fd)
            elif len(self._files) > self._most:
                self._forget(len(self._files) - self._most)

    def _forget(self, count: int) -> None:
        """Closes the least recently used; those in use are closed by the last who gives them back. Under the lock."""
        for _ in range(count):
            _, file = self._files.popitem(last=False)
            if not file.users:
                os.close(file.fd)
