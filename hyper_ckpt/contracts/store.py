"""What a byte store supplies: named bytes under one root. Knows nothing of what they mean."""

from __future__ import annotations

import enum
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

Bytes = bytes | bytearray | memoryview
ReadAt = Callable[[Sequence[memoryview], int], int]
"""`read_at(buffers, start)` fills buffers in turn with the object's bytes from `start` on, and returns how many."""

_READ_ATTEMPTS = 50
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.1


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

    It is closed or aborted, or both in this order, by one thread. Whether `list` and `stat` show it before it is closed
    is up to the store.
    """

    @abstractmethod
    def write_at(self, offset: int, data: Bytes) -> None:
        """Writes all of `data`, C-contiguous bytes of any item size and shape, at `offset`.

        Raises:
            StoreError: it could not be written whole, leaves the object's size, or the sink is closed or aborted; names
                the object and keeps the cause.
        """

    @abstractmethod
    def close(self, *, sync: bool) -> None:
        """Completes the object; with `sync`, it survives a power failure once `ByteStore.sync` has returned.

        It then has exactly the size that `create` was told, whatever of it was written.

        Raises:
            StoreError: it could not be completed, its name was taken meanwhile, or it was closed before.
        """

    @abstractmethod
    def abort(self) -> None:
        """Gives up and removes the object, also after a `close`, successful or not. Never raises.

        It may come while other threads write, which then get a `StoreError`, and may be called again: it removes what
        this sink made, never a later object of the same name.
        """


class ByteStore(ABC):
    """Named bytes under one root. Names are relative, with `/` between parts; missing parents are made.

    Every method but `list` refuses what is no such name with `StoreError`: empty, absolute, with parts that are empty,
    `.` or `..`, with a NUL, or that UTF-8 cannot encode. `hyper_ckpt.storage.names.check_name` does that.

    Every failure is a `StoreError` that names the object, or `MissingFileError` where it is absent. Where this object
    cannot be read, but others may be, it is `UnreadableFileError`: a run then goes on with an older checkpoint.
    Instances can be pickled or rebuilt from `url`; no I/O happens in a constructor. Every method may be called from
    any thread, several at once.

    `url` must be set: what the store was opened with, so that opening it again gives the same root. The root of a
    checkpoint's store is the checkpoint; lists of checkpoints open a store over the URL above it.
    """

    url: str

    @abstractmethod
    def create(self, name: str, size: int) -> Sink:
        """A new object of exactly `size` bytes, of any content until it is written.

        Raises:
            StoreError: there is no room for it, at once and not while it is written; or the name is taken, at the
                latest in `Sink.close`.
        """

    @abstractmethod
    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        """Fills each buffer with `length` bytes from `start`, for (start, length) in `ranges`. Called from several
        threads. Ranges may come in any order, overlap, and be thousands; buffers are writeable, C-contiguous, and of
        any item size and shape (`memoryview.cast("B")`).

        Raises:
            FileSizeError: a range leaves the object: nothing is filled up with anything else.
            MissingFileError: there is no such object, also where `ranges` is empty.
            CheckpointError: a range is negative or has another length than its buffer.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Names that start with `prefix`, sorted; empty if the root does not exist. Objects that are being written, and
        temporaries of the store itself, may be among them."""

    def list_sizes(self) -> dict[str, int] | None:
        """Sizes of all objects by name, where a listing has them in few requests. It may show an object late, but none
        that was gone before the call. None, which stores inherit, where each object takes a request of its own: then
        `stat` is asked by several threads."""
        return None

    @abstractmethod
    def delete(self, name: str) -> None:
        """Removes an object; an absent one is fine."""

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo | None:
        """Facts about an object, None if there is none.

        Raises:
            UnreadableFileError: what has this name is no object, such as a FIFO among files.
        """

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

    def reader(self, name: str) -> AbstractContextManager[ReadAt]:
        """Reads of one object, many in a row and from one thread, with as little around each as can be: between a block
        and its digest every step of Python costs. Other threads have readers of their own, of the same object too.

        What is given may fill less than it should, or raise OSError: `read_into` then does it, or says what is wrong.
        Whatever else it raises ends the load.

        Raises:
            MissingFileError: there is no such object, here or at the first read.
        """

        def read_at(buffers: Sequence[memoryview], start: int) -> int:
            ends = [*itertools.accumulate([buffer.nbytes for buffer in buffers], initial=start)]
            self.read_into(name, [(at, end - at) for at, end in itertools.pairwise(ends)], buffers)
            return ends[-1] - start

        return nullcontext(read_at)

    def reading(self) -> AbstractContextManager[None]:
        """Entered around many reads, by one thread or several: what one opens may stay open for the next. An
        object that is replaced or deleted meanwhile may be read as it was. Stores that open nothing inherit this."""
        return nullcontext()

    def missing_folders(self) -> int:
        """How many directories are to be made for the root, itself and those above it. Stores without directories
        inherit this."""
        return 0

    def remove_folders(self, most: int) -> None:
        """Takes back, after a failure, up to `most` directories that were made for the root: those, and all below it,
        in which nothing lies. Never raises. Stores without directories inherit this."""
        return None

    def sync(self) -> None:
        """Makes names durable: after it, sinks closed with `sync` survive a power failure. Stores that need no such
        step inherit this."""
        return None

    def read(self, name: str) -> bytes:
        """A whole object, of one version: never of two, and never a part, while `publish` replaces it.

        This one looks at the etag before and after, and reads again where it changed. Override it where an object can
        be had in one request.

        Raises:
            MissingFileError: there is no such object.
            StoreError: it was replaced during each of many attempts.
        """
        from hyper_ckpt.errors import FileSizeError, MissingFileError, StoreError

        for attempt in range(_READ_ATTEMPTS):
            info = self.stat(name)
            if info is None:
                raise MissingFileError(f"{self.url}/{name} does not exist")
            data, short = bytearray(info.size), None
            try:
                self.read_into(name, [(0, info.size)], [memoryview(data)])
            except (FileSizeError, MissingFileError) as error:
                short = error
            after = self.stat(name)
            if after is not None and after.etag == info.etag:
                if short is not None:
                    raise short
                return bytes(data)
            time.sleep(min(_FIRST_PAUSE * 2**attempt, _LAST_PAUSE))
        raise StoreError(f"{self.url}/{name} was replaced during each of {_READ_ATTEMPTS} attempts to read it")


@dataclass(frozen=True)
class StoreSpec:
    """How a plugin announces a store: the URL schemes it claims ("" is a plain path) and how to open one.

    `target` is "module:callable", imported only when the scheme is used; called with the URL (for scheme
    "" the path) it returns a `ByteStore`.
    """

    schemes: tuple[str, ...]
    target: str
