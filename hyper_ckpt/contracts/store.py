"""What a byte store supplies: named bytes under one root. Knows nothing of what they mean."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

Bytes = bytes | bytearray | memoryview


class Expect(enum.Enum):
    """What `ByteStore.publish` expects to find, where it is not a known etag."""

    ABSENT = "absent"
    ANY = "any"


@dataclass(frozen=True)
class ObjectInfo:
    """Size in bytes, a token that changes whenever the content is replaced, and seconds since the epoch."""

    size: int
    etag: str
    modified: float


class Sink(ABC):
    """An object being written at known offsets, by several threads at once. Not visible to `publish`'s rules.

    It is closed or aborted, or both in this order, by one thread.
    """

    @abstractmethod
    def write_at(self, offset: int, data: Bytes) -> None:
        """Writes all of `data` at `offset`.

        Raises:
            StoreError: it could not be written whole; names the object and keeps the cause.
        """

    @abstractmethod
    def close(self, *, sync: bool) -> None:
        """Completes the object; with `sync`, it survives a power failure once `ByteStore.sync` has returned."""

    @abstractmethod
    def abort(self) -> None:
        """Gives up and removes the object, also after a `close`, successful or not. Never raises."""


class ByteStore(ABC):
    """Named bytes under one root. Names are relative, with `/` between parts; missing parents are made.

    Every failure is a `StoreError` that names the object, or `MissingFileError` where it is absent.
    Instances can be pickled or rebuilt from `url`; no I/O happens in a constructor. Every method may be called from
    any thread, several at once.
    """

    url: str

    @abstractmethod
    def create(self, name: str, size: int) -> Sink:
        """A new object of exactly `size` bytes; room is made first. An existing name is an error."""

    @abstractmethod
    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        """Fills each buffer with `length` bytes from `start`, for (start, length) in `ranges`; a short read is
        an error (`FileSizeError`). Called from several threads."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Names that start with `prefix`, sorted; empty if the root does not exist. Objects that are being written, and
        temporaries of the store itself, may be among them."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Removes an object; an absent one is fine."""

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo | None:
        """Facts about an object, None if there is none."""

    @abstractmethod
    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        """Puts a small object in place atomically: readers see the old bytes whole or the new bytes whole.

        It may fail with `StoreError` when the object is in place already (a sync fails, an answer is lost): whoever
        must know looks at what is there.

        Args:
            expect: `ABSENT`: only if there is none; an etag: only if it is still that; `ANY`: whatever is there.
            sync: durable when this returns.

        Returns:
            The new etag.

        Raises:
            CheckpointReplacedError: what is there is not what was expected; nothing was changed.
        """

    def sync(self) -> None:
        """Makes names durable: after it, sinks closed with `sync` survive a power failure. Stores that need no such
        step inherit this."""
        return None

    def read(self, name: str) -> bytes:
        """A whole object. Override it where that is cheaper than `stat` and `read_into`."""
        info = self.stat(name)
        if info is None:
            from hyper_ckpt.errors import MissingFileError

            raise MissingFileError(f"{self.url}/{name} does not exist")
        data = bytearray(info.size)
        if info.size:
            self.read_into(name, [(0, info.size)], [memoryview(data)])
        return bytes(data)


@dataclass(frozen=True)
class StoreSpec:
    """How a plugin announces a store: the URL schemes it claims ("" is a plain path) and how to open one.

    `target` is "module:callable", imported only when the scheme is used; called with the URL (for scheme
    "" the path) it returns a `ByteStore`.
    """

    schemes: tuple[str, ...]
    target: str
