"""Ranks that are threads: every collective is one rendezvous, in step or in error."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, Done, KeyValueStore, Pending, Ranks, packed, unpacked
from hyper_ckpt.key_value import InProcessKeyValueStore

Group = tuple[int, ...]


class WorldBrokenError(RuntimeError):
    """A collective cannot complete: another rank failed, left, or called something else."""


@dataclass
class Traffic:
    """What one rank sent and received: payload bytes, each counted once however many ranks get it."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def messages(self) -> int:
        """Calls of any kind that this rank made."""
        return sum(self.calls.values())

    def count(self, call: str, sent: int, received: int) -> None:
        """Adds one call."""
        self.calls[call] += 1
        self.bytes_sent += sent
        self.bytes_received += received


class ThreadWorld:
    """What the ranks of one world share."""

    def __init__(self, world_size: int, deadline: float) -> None:
        self.world_size = world_size
        self.deadline = deadline
        self.key_value_store = InProcessKeyValueStore()
        self._changed = threading.Condition()
        self._meetings: dict[tuple[Group, int], dict[int, tuple[str, Any]]] = {}
        self._done: Counter[tuple[Group, int]] = Counter()
        self._waiting: dict[int, tuple[Group, dict[int, tuple[str, Any]]]] = {}
        self._left: set[int] = set()
        self._broken: str | None = None

    def abort(self, why: str) -> None:
        """Releases every waiting rank with an error; the first reason is kept."""
        with self._changed:
            self._broken = self._broken or why
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """Says that a rank takes part in nothing any more."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def exchange(self, members: Group, number: int, rank: int, call: str, value: Any) -> list[Any]:
        """Meets the other members in their `number`-th collective. Returns the members' values, in their order.

        Raises:
            WorldBrokenError: the members are out of step, or one cannot come any more.
        """
        key = (members, number)
        with self._changed:
            meeting = self._meetings.setdefault(key, {})
            meeting[rank] = (call, value)
            self._changed.notify_all()
            self._waiting[rank] = (members, meeting)
            try:
                while len(meeting) < len(members):
                    self._check(members, meeting, call)
                    self._changed.wait(max(self.deadline - time.monotonic(), 0))
            finally:
                del self._waiting[rank]
            calls = {each: meeting[each][0] for each in members}
            if len(set(calls.values())) > 1:
                self._broken = self._broken or f"collectives out of step: {calls}"
                self._changed.notify_all()
                raise WorldBrokenError(self._broken)
            self._done[key] += 1
            if self._done[key] == len(members):
                del self._meetings[key], self._done[key]
            return [meeting[each][1] for each in members]

    def _check(self, members: Group, meeting: dict[int, tuple[str, Any]], call: str) -> None:
        absent = [rank for rank in members if rank not in meeting]
        if self._broken is not None:
            raise WorldBrokenError(self._broken)
        gone = [rank for rank in absent if rank in self._left]
        if gone:
            raise WorldBrokenError(f"{call} of ranks {members}: ranks {gone} have returned without calling it")
        # A rank whose meeting is complete but which hasn't woken up yet doesn't wait any more.
        waiting = [rank for rank, (group, came) in self._waiting.items() if len(came) < len(group)]
        if len(waiting) + len(self._left) == self.world_size:
            calls = {rank: self._waiting[rank][1][rank][0] for rank in sorted(waiting)}
            raise WorldBrokenError(f"every rank waits for another one: {calls}")
        if time.monotonic() >= self.deadline:
            raise WorldBrokenError(f"{call} of ranks {members}: ranks {absent} have not come, and time is up")


class _CountedKeyValueStore(KeyValueStore):
    def __init__(self, inner: KeyValueStore, traffic: Traffic) -> None:
        self._inner = inner
        self._traffic = traffic

    def set_many(self, items: Mapping[str, bytes]) -> None:
        for key, value in items.items():
            if not key.isascii() or not isinstance(value, bytes):
                raise TypeError(f"a key-value store takes ASCII keys and bytes, not {key!r}: {type(value).__name__}")
        self._traffic.count("key_value_store.set_many", sum(map(len, items.values())), 0)
        self._inner.set_many(items)

    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        found = self._inner.get_many(keys, timeout)
        # Keys that aren't there yet are asked for again and again: how often says nothing of the code under test.
        if found:
            self._traffic.count("key_value_store.get_many", 0, sum(map(len, found.values())))
        return found

    def delete(self, *keys: str) -> None:
        self._traffic.count("key_value_store.delete", 0, 0)
        self._inner.delete(*keys)

    def delete_prefix(self, prefix: str) -> None:
        self._traffic.count("key_value_store.delete_prefix", 0, 0)
        self._inner.delete_prefix(prefix)


class ThreadRanks(Ranks):
    """One rank of a `ThreadWorld`. Made in the rank's own thread; collectives belong to that thread.

    What travels is copied or packed: ranks share no memory. `traffic` counts it.
    """

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.traffic = Traffic()
        self._world = world
        self._rank = rank
        self._everybody: Group = tuple(range(world.world_size))
        self._numbers: Counter[Group] = Counter()
        self._thread = threading.get_ident()
        self._key_value_store = _CountedKeyValueStore(world.key_value_store, self.traffic)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world.world_size

    @property
    def key_value_store(self) -> KeyValueStore:
        return self._key_value_store

    def all_gather_object(self, value: Any) -> list[Any]:
        mine = packed(value)
        gathered = self._exchange("all_gather_object", mine, self._everybody)
        self.traffic.count("all_gather_object", len(mine), sum(map(len, gathered)) - len(mine))
        return [unpacked(each) for each in gathered]

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        gathered = self._exchange("gather_bytes", bytes(data), self._everybody)
        if self._rank != 0:
            self.traffic.count("gather_bytes", len(data), 0)
            return None
        self.traffic.count("gather_bytes", 0, sum(map(len, gathered[1:])))
        return gathered

    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        if self._rank == 0 and (parts is None or len(parts) != self.world_size):
            raise ValueError(f"rank 0 scatters exactly {self.world_size} parts")
        sent: list[bytes] = self._exchange("scatter_bytes", parts if self._rank == 0 else None, self._everybody)[0]
        mine = bytes(sent[self._rank])
        if self._rank == 0:
            self.traffic.count("scatter_bytes", sum(map(len, sent[1:])), 0)
        else:
            self.traffic.count("scatter_bytes", 0, len(mine))
        return mine

    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        members: Group = self._everybody if group is None else group
        if src not in members or self._rank not in members:
            raise ValueError(f"a broadcast from rank {src} on rank {self._rank} in the group {members}")
        sizes = [buffer.nbytes for buffer in buffers]
        payload = [buffer.tobytes() for buffer in buffers] if self._rank == src else None
        # The sizes are part of the call: unequal ones would garble or hang real ranks.
        received = self._exchange(f"broadcast_into(src={src}, sizes={sizes})", payload, members)
        if self._rank == src:
            self.traffic.count("broadcast_into", sum(sizes), 0)
            return Done()
        for buffer, data in zip(buffers, received[members.index(src)], strict=True):
            buffer[:] = np.frombuffer(data, np.uint8)
        self.traffic.count("broadcast_into", 0, sum(sizes))
        return Done()

    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        for ranks in rank_sets:
            if not ranks or tuple(sorted(set(ranks))) != tuple(ranks) or not set(ranks) <= set(self._everybody):
                raise ValueError(f"a group is a sorted set of ranks below {self.world_size}, not {ranks}")
        self._exchange(f"groups({list(rank_sets)})", None, self._everybody)
        self.traffic.count("groups", 0, 0)
        return [tuple(ranks) if self._rank in ranks else None for ranks in rank_sets]

    def _exchange(self, call: str, value: Any, members: Group) -> list[Any]:
        if threading.get_ident() != self._thread:
            self._world.abort(f"rank {self._rank} called {call} outside its own thread")
            raise WorldBrokenError(f"{call} was called outside the thread of rank {self._rank}")
        self._numbers[members] += 1
        return self._world.exchange(members, self._numbers[members], self._rank, call, value)
