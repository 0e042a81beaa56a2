"""The ranks of the framework's process group, over the core's key-value store: in place of a vendor's collectives."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, Done, Pending, Ranks, packed, unpacked
from hyper_ckpt.errors import PlanError, PlatformError, RankFailedError, RankTimeoutError
from hyper_ckpt.key_value import Address, KeyValueClient, KeyValueServer
from hyper_ckpt_sample.framework import ProcessGroup

PARTING_SECONDS = 5.0
"""How long rank 0 serves the others after it is done itself."""
_RETRY_SECONDS = 0.02
_PIECE = 16 << 20  # the store takes small values
Members = tuple[int, ...]


class SampleRanks(Ranks):
    """The members of a process group, two or more. The training's own communication is never used.

    Nothing is connected before the key-value store is first used, which waits for rank 0 alone.
    """

    def __init__(self, group: ProcessGroup) -> None:
        # Not the group itself: the platform lives as long as that, and no longer.
        self._rank, self._world_size = group.rank, group.world_size
        self._address = Address(group.address, group.port, group.secret)
        self._everybody: Members = tuple(range(group.world_size))
        self._numbers: Counter[Members] = Counter()
        self._lock = threading.Lock()
        self._store: KeyValueServer | KeyValueClient | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def key_value_store(self) -> KeyValueServer | KeyValueClient:
        with self._lock:
            if self._store is None:
                self._store = self._opened()
            return self._store

    def all_gather_object(self, value: Any) -> list[Any]:
        return [unpacked(data) for data in self._all_gather(packed(value))]

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        key = self._next_key(self._everybody)
        if self._rank != 0:
            self._post(f"{key}/{self._rank}", data)
            return None
        return [data, *(self.take(f"{key}/{rank}", rank) for rank in self._everybody[1:])]

    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        if self._rank == 0 and (parts is None or len(parts) != self._world_size):
            raise PlanError(f"rank 0 scatters exactly {self._world_size} parts")
        key = self._next_key(self._everybody)
        if self._rank != 0 or parts is None:
            return self.take(f"{key}/{self._rank}", 0)
        for rank in self._everybody[1:]:
            self._post(f"{key}/{rank}", parts[rank])
        return bytes(parts[0])

    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        members: Members = self._everybody if group is None else group
        if src not in members or self._rank not in members:
            raise PlanError(f"a broadcast from rank {src} to rank {self._rank} in the group of ranks {members}")
        key = self._next_key(members)
        if self._rank != src:
            return _Arriving(self, key, src, len(members) - 1, tuple(buffers), time.monotonic())
        if len(members) > 1:
            self._post(key, b"".join(buffer.tobytes() for buffer in buffers))
        return Done()

    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        for ranks in rank_sets:
            if not ranks or tuple(sorted(set(ranks))) != tuple(ranks) or not set(ranks) <= set(self._everybody):
                raise PlanError(f"a group is a sorted set of ranks below {self._world_size}, not {ranks}")
        # Where groups must be connected, do it here, by their members only, and keep them.
        return [tuple(ranks) if self._rank in ranks else None for ranks in rank_sets]

    def close(self, patience: float = PARTING_SECONDS) -> None:
        """Leaves the group. Rank 0 serves the others for up to `patience` seconds more."""
        with self._lock:
            if isinstance(self._store, KeyValueServer):
                deadline = time.monotonic() + patience
                for rank in self._everybody[1:]:  # one that has not come yet would not find it any more
                    self._store.get(f"here/{rank}", max(deadline - time.monotonic(), 0.0))
                self._store.close(max(deadline - time.monotonic(), 0.0))
            elif self._store is not None:
                self._store.close()

    def take(self, key: str, sender: int, readers: int = 1, since: float | None = None) -> bytes:
        """What another rank posts; waits for it, up to `timeout` from `since` (of `time.monotonic`) or now on.

        Raises:
            RankFailedError: rank 0, which hosts the store, is gone.
            RankTimeoutError: the sender did not post in time.
        """
        store, since = self.key_value_store, time.monotonic() if since is None else since
        size = store.get(f"{key}/size", max(since + self.timeout - time.monotonic(), 0.0))
        if size is None:
            raise RankTimeoutError(f"a collective failed: rank {sender} did not come in {self.timeout:g} s", [sender])
        data = b"".join(store.get(f"{key}/{start}") or b"" for start in range(0, int(size), _PIECE))
        if readers == 1 or store.add(f"{key}/readers", 1) == readers:  # this one is the last
            store.delete_prefix(f"{key}/")
        return data

    def _post(self, key: str, data: bytes) -> None:
        store = self.key_value_store
        for start in range(0, len(data), _PIECE):
            store.set(f"{key}/{start}", data[start : start + _PIECE])
        store.set(f"{key}/size", b"%d" % len(data))

    def _all_gather(self, data: bytes) -> list[bytes]:
        key, others = self._next_key(self._everybody), self._world_size - 1
        self._post(f"{key}/{self._rank}", data)
        return [data if rank == self._rank else self.take(f"{key}/{rank}", rank, others) for rank in self._everybody]

    def _next_key(self, members: Members) -> str:
        """Names a collective: its members call the same ones in the same order."""
        self._numbers[members] += 1
        return f"collective/{','.join(map(str, members))}/{self._numbers[members]}"

    def _opened(self) -> KeyValueServer | KeyValueClient:
        deadline, me = time.monotonic() + self.timeout, weakref.ref(self)
        while True:
            try:
                if self._rank == 0:
                    return KeyValueServer(self._address.host, self._address.port, self._address.token)
                client = KeyValueClient(self._address, lambda: getattr(me(), "timeout", 0.0))
                client.set(f"here/{self._rank}", b"")
                return client
            except (PlatformError, RankFailedError) as error:  # rank 0 is late; an earlier group may have its port yet
                if time.monotonic() > deadline:
                    raise RankTimeoutError(f"rank 0 did not open {self._address} in {self.timeout:g} s", [0]) from error
            time.sleep(_RETRY_SECONDS)


@dataclass(frozen=True, eq=False)
class _Arriving:
    """A broadcast that this rank receives."""

    ranks: SampleRanks
    key: str
    src: int
    readers: int
    buffers: tuple[ByteBuffer, ...]
    since: float

    def wait(self) -> None:
        data = np.frombuffer(self.ranks.take(self.key, self.src, self.readers, self.since), np.uint8)
        sizes = [buffer.nbytes for buffer in self.buffers]
        if sum(sizes) != len(data):
            raise PlanError(f"rank {self.src} sent {len(data)} bytes, {sum(sizes)} were expected")
        for buffer, end in zip(self.buffers, np.cumsum(sizes), strict=True):
            buffer[:] = data[end - buffer.nbytes : end]
