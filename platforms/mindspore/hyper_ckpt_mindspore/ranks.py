"""The ranks of a MindSpore group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mindspore as ms
import mindspore.mint.distributed as dist

from hyper_ckpt.contracts.platform import ByteBuffer, Done, Pending, Ranks
from hyper_ckpt.errors import PlanError, PlatformError
from hyper_ckpt.key_value import KeyValueClient, KeyValueServer
from hyper_ckpt_mindspore.collectives import Group, group_of, world_name
from hyper_ckpt_mindspore.rendezvous import open_store

# Of mccl, MindSpore's collectives on the CPU: the limit is in its code, the speed is an estimate.
_MCCL_SECONDS = 30.0
_MCCL_BYTES_PER_SECOND = 50e6


@dataclass(frozen=True)
class RankGroup:
    """Some ranks of the platform. `group` is None where there is nobody to talk to."""

    ranks: tuple[int, ...]
    group: Group | None


class MindSporeRanks(Ranks):
    """The members of a group, numbered 0..world_size-1 as there, two or more.

    Collectives run on the group itself, in the caller's thread: on the CPU groups share their connections, so that
    two threads would take each other's messages. MindSpore limits how long they may take, `timeout` does not: on the
    CPU that is `fixed_timeout`.

    Args:
        group: name of a group of MindSpore that this process is a member of; None is the world group.
        store, key_value_host: see `MindSporePlatform`.

    Raises:
        PlatformError: there is no such group here.
    """

    def __init__(
        self, group: str | None = None, store: dist.TCPStore | None = None, key_value_host: str | None = None
    ) -> None:
        try:
            self._group = Group(world_name() if group is None else group)
        except (RuntimeError, ValueError) as error:
            raise PlatformError(f"this process is not a member of a group named {group!r}") from error
        self._store, self._key_value_host = store, key_value_host
        self.global_ranks = self._group.ranks
        self._groups: dict[tuple[int, ...], RankGroup] = {}
        if ms.get_context("device_target") == "CPU":
            self.fixed_timeout, self.broadcast_bandwidth = _MCCL_SECONDS, _MCCL_BYTES_PER_SECOND

    @property
    def rank(self) -> int:
        return self._group.member

    @property
    def world_size(self) -> int:
        return self._group.size

    @cached_property
    def key_value_store(self) -> KeyValueServer | KeyValueClient:
        return open_store(self._group, lambda: self.timeout, self._store, self._key_value_host)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._everybody.all_gather_object(value)

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        return self._everybody.gather_bytes(data)

    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        if self.rank == 0 and (parts is None or len(parts) != self.world_size):
            raise PlanError(f"rank 0 scatters exactly {self.world_size} parts")
        return self._everybody.scatter_bytes(parts if self.rank == 0 else None)

    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        members = RankGroup(tuple(range(self.world_size)), self._everybody) if group is None else group
        if src not in members.ranks:
            raise PlanError(f"a broadcast from rank {src} in the group of ranks {members.ranks}")
        return Done() if members.group is None else members.group.broadcast(buffers, members.ranks.index(src))

    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        return [self._of(tuple(ranks)) if self.rank in ranks else None for ranks in rank_sets]

    @property
    def _everybody(self) -> Group:
        if self._store is None:
            # Its opening is a collective too, which then comes first on all ranks, whatever each of them does first.
            self.key_value_store  # noqa: B018
        return self._group

    def _of(self, ranks: tuple[int, ...]) -> RankGroup:
        """The group of `ranks`, made once, by its members only."""
        known = self._groups.get(ranks)
        if known is None:
            if ranks != tuple(sorted(set(ranks))) or ranks[-1] >= self.world_size:
                raise PlanError(f"a group is a sorted set of ranks below {self.world_size}, not {ranks}")
            known = self._groups[ranks] = RankGroup(ranks, self._made(ranks))
        return known

    def _made(self, ranks: tuple[int, ...]) -> Group | None:
        if len(ranks) == self.world_size:
            return self._group
        return group_of([self.global_ranks[rank] for rank in ranks]) if len(ranks) > 1 else None
