"""Objects in the memory of this process, as a service elsewhere would hold them. For tests and examples."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hyper_ckpt.contracts.store import Bytes, ByteStore, Expect, ObjectInfo, Sink
from hyper_ckpt.errors import CheckpointReplacedError, FileSizeError, MissingFileError, StoreError
from hyper_ckpt.storage.buffers import as_bytes, runs
from hyper_ckpt.storage.names import check_name

_SCHEME = "memory://"


@dataclass(frozen=True)
class _Object:
    data: bytes | bytearray  # nobody writes to it any more
    info: ObjectInfo


@dataclass
class _Bucket:
    """What the service holds: whole objects by key. `lock` guards all of it."""

    objects: dict[str, _Object] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def put(self, key: str, data: bytes | bytearray) -> str:
        """Call it with the lock held."""
        etag = f"v{next(self.versions)}"
        self.objects[key] = _Object(data, ObjectInfo(len(data), etag, time.time()))
        return etag


class MemoryStore(ByteStore):
    """Simulates an object store: all stores of one process with the same bucket see the same objects.

    Unlike a file, an object appears when its sink is closed. Another process sees nothing of it, and
    nothing outlives the process, so that `sync` has no meaning.

    Args:
        url: "memory://bucket/path"; the path may be missing.
    """

    _buckets: ClassVar[dict[str, _Bucket]] = {}
    _buckets_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str) -> None:
        bucket, _, path = url.removeprefix(_SCHEME).strip("/").partition("/")
        if not url.startswith(_SCHEME) or not bucket:
            raise StoreError(f"{url!r} is not of the form memory://bucket/path")
        self.url = f"{_SCHEME}{bucket}/{path}".rstrip("/")
        self._root = f"{path}/" if path else ""
        with self._buckets_lock:
            self._bucket = self._buckets.setdefault(bucket, _Bucket())

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    def __reduce__(self) -> tuple[Callable[[str], MemoryStore], tuple[str]]:
        return MemoryStore, (self.url,)

    @classmethod
    def drop_bucket(cls, bucket: str) -> None:
        """Forgets a bucket. Stores that are open keep theirs; new ones find an empty one."""
        with cls._buckets_lock:
            cls._buckets.pop(bucket, None)

    def create(self, name: str, size: int) -> Sink:
        key = self._key(name)
        with self._bucket.lock:
            self._refuse_existing(name)
        try:
            data = bytearray(size)
        except (MemoryError, OverflowError) as error:
            raise StoreError(f"creating {self.url}/{name} failed: no memory for {size:,} bytes") from error

        def complete() -> None:
            with self._bucket.lock:
                self._refuse_existing(name)
                self._bucket.put(key, data)

        def remove() -> None:
            with self._bucket.lock:
                held = self._bucket.objects.get(key)
                if held is not None and held.data is data:
                    del self._bucket.objects[key]

        return _MemorySink(f"{self.url}/{name}", data, complete, remove)

    def read_into(self, name: str, ranges: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> None:
        data = memoryview(self._get(name))
        for start, views in runs(ranges, buffers):
            for view in views:
                if start + view.nbytes > len(data):
                    raise FileSizeError(f"{self.url}/{name} ends at {len(data)}, before {start + view.nbytes}")
                view[:] = data[start : start + view.nbytes]
                start += view.nbytes

    def read(self, name: str) -> bytes:
        return bytes(self._get(name))

    def list(self, prefix: str = "") -> list[str]:
        with self._bucket.lock:
            keys = sorted(self._bucket.objects)
        return [key[len(self._root) :] for key in keys if key.startswith(self._root + prefix)]

    def list_sizes(self) -> dict[str, int]:
        with self._bucket.lock:
            found = {key: held.info.size for key, held in self._bucket.objects.items()}
        return {key[len(self._root) :]: size for key, size in found.items() if key.startswith(self._root)}

    def delete(self, name: str) -> None:
        key = self._key(name)
        with self._bucket.lock:
            self._bucket.objects.pop(key, None)

    def stat(self, name: str) -> ObjectInfo | None:
        key = self._key(name)
        with self._bucket.lock:
            held = self._bucket.objects.get(key)
        return None if held is None else held.info

    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        key = self._key(name)
        with self._bucket.lock:
            held = self._bucket.objects.get(key)
            found = Expect.ABSENT if held is None else held.info.etag
            if expect not in (Expect.ANY, found):
                raise CheckpointReplacedError(
                    f"{self.url}/{name} is not what it was when this save began: another saver published there "
                    "meanwhile. Give every job its own path."
                )
            return self._bucket.put(key, bytes(data))

    def _key(self, name: str) -> str:
        return self._root + check_name(name)

    def _get(self, name: str) -> bytes | bytearray:
        key = self._key(name)
        with self._bucket.lock:
            held = self._bucket.objects.get(key)
        if held is None:
            raise MissingFileError(f"reading {self.url}/{name} failed: it does not exist. Was it removed?")
        return held.data

    def _refuse_existing(self, name: str) -> None:
        if self._key(name) in self._bucket.objects:
            raise StoreError(f"creating {self.url}/{name} failed: it exists. Remove it first, or use another path.")


class _MemorySink(Sink):
    def __init__(self, where: str, data: bytearray, complete: Callable[[], None], remove: Callable[[], None]) -> None:
        self._where = where
        self._data = memoryview(data)
        self._complete = complete
        self._remove = remove
        self._closed = False

    def write_at(self, offset: int, data: Bytes) -> None:
        view = as_bytes(data)
        if self._closed:
            raise StoreError(f"{self._where} is closed: nothing more can be written to it")
        if offset < 0 or offset + view.nbytes > len(self._data):
            raise StoreError(f"{view.nbytes} bytes at {offset} do not fit {self._where}, made for {len(self._data)}")
        self._data[offset : offset + view.nbytes] = view

    def close(self, *, sync: bool) -> None:
        if self._closed:
            raise StoreError(f"{self._where} can't be closed: it is already")
        self._closed = True
        self._complete()

    def abort(self) -> None:
        self._closed = True
        self._remove()
