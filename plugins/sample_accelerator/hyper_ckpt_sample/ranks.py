"""The ranks of the framework's process group, over the switchboard of `mailbox`: in place of a vendor's collectives."""

from __future__ import annotations

import pickle
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, Done, Mailbox, Pending, Ranks
from hyper_ckpt.errors import PlanError, RankFailedError, RankTimeoutError
from hyper_ckpt_sample.framework import ProcessGroup
from hyper_ckpt_sample.mailbox import PARTING_SECONDS, Client, Hub, HubMailbox, Op, Status

_FIRST_POLL, _LAST_POLL = 0.0002, 0.01
Members = tuple[int, ...]


class SampleRanks(Ranks):
    """The members of a process group, two or more. The training's own communication is never used.

    Nothing is connected before the mailbox is first used, which waits for rank 0 alone.
    """

    def __init__(self, group: ProcessGroup) -> None:
        # Not the group itself: the platform lives as long as that, and no longer.
        self._rank, self._world_size = group.rank, group.world_size
        self._address, self._port = group.address, group.port
        self._everybody: Members = tuple(range(group.world_size))
        self._numbers: Counter[Members] = Counter()
        self._lock = threading.Lock()
        self._hub: Hub | None = None
        self._client: Client | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def mailbox(self) -> Mailbox:
        return HubMailbox(self._connected())

    def all_gather_object(self, value: Any) -> list[Any]:
        return [pickle.loads(data) for data in self._all_gather(pickle.dumps(value))]

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        key = self._next_key(self._everybody)
        if self._rank != 0:
            self._post(f"{key}/{self._rank}", data, 1)
            return None
        return [data, *(self.take(f"{key}/{rank}", rank) for rank in self._everybody[1:])]

    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        if self._rank == 0 and (parts is None or len(parts) != self._world_size):
            raise PlanError(f"rank 0 scatters exactly {self._world_size} parts")
        key = self._next_key(self._everybody)
        if self._rank != 0 or parts is None:
            return self.take(f"{key}/{self._rank}", 0)
        for rank in self._everybody[1:]:
            self._post(f"{key}/{rank}", parts[rank], 1)
        return bytes(parts[0])

    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        members: Members = self._everybody if group is None else group
        if src not in members or self._rank not in members:
            raise PlanError(f"a broadcast from rank {src} to rank {self._rank} in the group of ranks {members}")
        key = self._next_key(members)
        if self._rank != src:
            return _Arriving(self, key, src, tuple(buffers), time.monotonic())
        if len(members) > 1:
            self._post(key, b"".join(buffer.tobytes() for buffer in buffers), len(members) - 1)
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
            if self._client is not None:
                self._client.close()
            if self._hub is not None:
                self._hub.close(patience)

    def take(self, key: str, sender: int, since: float | None = None) -> bytes:
        """What another rank posts, once; waits for it, up to `timeout` from `since` (of `time.monotonic`) or now on.

        Raises:
            RankFailedError: the sender is gone.
            RankTimeoutError: it did not post in time.
        """
        client, pause = self._connected(), _FIRST_POLL
        deadline = (time.monotonic() if since is None else since) + self.timeout
        while True:
            status, data = client.call(Op.TAKE, key, struct.pack("<I", sender))
            if status == Status.OK:
                return data
            if status == Status.GONE:
                raise RankFailedError(f"a collective failed: rank {sender} has ended", [sender])
            if time.monotonic() > deadline:
                raise RankTimeoutError(
                    f"a collective failed: rank {sender} did not come in {self.timeout:g} s", [sender]
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_POLL)

    def _post(self, key: str, data: bytes, readers: int) -> None:
        self._connected().call(Op.POST, key, struct.pack("<I", readers) + data)

    def _all_gather(self, data: bytes) -> list[bytes]:
        key = self._next_key(self._everybody)
        self._post(f"{key}/{self._rank}", data, self._world_size - 1)
        return [data if rank == self._rank else self.take(f"{key}/{rank}", rank) for rank in self._everybody]

    def _next_key(self, members: Members) -> str:
        """Names a collective: its members call the same ones in the same order."""
        self._numbers[members] += 1
        return f"{','.join(map(str, members))}/{self._numbers[members]}"

    def _connected(self) -> Client:
        with self._lock:
            if self._client is None:
                if self._rank == 0 and self._hub is None:
                    self._hub = Hub(self._address, self._port, self._world_size, self.timeout)
                    weakref.finalize(self, self._hub.close)
                self._client = Client(self._address, self._port, self._rank, self._world_size, self.timeout)
                weakref.finalize(self, self._client.close)
            return self._client


@dataclass(frozen=True, eq=False)
class _Arriving:
    """A broadcast that this rank receives."""

    ranks: SampleRanks
    key: str
    src: int
    buffers: tuple[ByteBuffer, ...]
    since: float

    def wait(self) -> None:
        data = np.frombuffer(self.ranks.take(self.key, self.src, self.since), np.uint8)
        sizes = [buffer.nbytes for buffer in self.buffers]
        if sum(sizes) != len(data):
            raise PlanError(f"rank {self.src} sent {len(data)} bytes, {sum(sizes)} were expected")
        for buffer, end in zip(self.buffers, np.cumsum(sizes), strict=True):
            buffer[:] = data[end - buffer.nbytes : end]
