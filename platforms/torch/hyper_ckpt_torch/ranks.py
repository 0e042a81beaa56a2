"""The ranks of a torch process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist

from hyper_ckpt.contracts.platform import ByteBuffer, Done, Pending, Ranks
from hyper_ckpt.errors import PlanError, PlatformError
from hyper_ckpt.key_value import KeyValueClient, KeyValueServer
from hyper_ckpt_torch.gloo import GlooGroup
from hyper_ckpt_torch.rendezvous import open_store


@dataclass(frozen=True)
class RankGroup:
    """Some ranks of the platform. `gloo` is None where there is nobody to talk to."""

    ranks: tuple[int, ...]
    gloo: GlooGroup | None


class TorchRanks(Ranks):
    """The members of `process_group`, numbered 0..world_size-1 as there, two or more.

    The process group itself is never used. Nothing is connected before it is needed: the key-value store first,
    which waits for rank 0 alone; gloo groups at the first collective, when all have met in the store.

    Args:
        process_group: initialised; this process is a member.
        key_value_host, groups: see `TorchPlatform`.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, key_value_host: str | None = None, groups: Sequence[Any] = ()
    ) -> None:
        self._process_group_name = process_group.group_name
        self._key_value_host = key_value_host
        self._rank = dist.get_rank(process_group)
        self.global_ranks = tuple(dist.get_process_group_ranks(process_group))
        self._groups: dict[tuple[int, ...], RankGroup] = {}
        self._given = {ranks: group for ranks, group in map(self._of_caller, groups) if ranks}
        self._compared = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self.global_ranks)

    @cached_property
    def key_value_store(self) -> KeyValueServer | KeyValueClient:
        return open_store(
            self._process_group_name, self._rank, self.world_size, lambda: self.timeout, self._key_value_host
        )

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._everybody.all_gather_object(value)

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        return self._everybody.gather_bytes(data)

    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        if self._rank == 0 and (parts is None or len(parts) != self.world_size):
            raise PlanError(f"rank 0 scatters exactly {self.world_size} parts")
        return self._everybody.scatter_bytes(parts if self._rank == 0 else None)

    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        members: RankGroup = self._group(tuple(range(self.world_size))) if group is None else group
        if src not in members.ranks:
            raise PlanError(f"a broadcast from rank {src} in the group of ranks {members.ranks}")
        return Done() if members.gloo is None else members.gloo.broadcast(buffers, members.ranks.index(src))

    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        if not self._compared:
            self._compare_given()
        return [self._group(tuple(ranks)) if self._rank in ranks else None for ranks in rank_sets]

    def _of_caller(self, group: Any) -> tuple[tuple[int, ...], GlooGroup | None]:
        """One of the caller's groups with its ranks; none where this process is not in it."""
        if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
            return (), None
        number_of = {rank: number for number, rank in enumerate(self.global_ranks)}
        ranks = tuple([number_of.get(rank, -1) for rank in dist.get_process_group_ranks(group)])
        if -1 in ranks or list(ranks) != sorted(ranks):
            raise PlatformError(
                f"groups= has one of ranks {dist.get_process_group_ranks(group)}: they must be ranks of the process "
                f"group {list(self.global_ranks)}, in its order"
            )
        return ranks, GlooGroup.of_caller(group, lambda: self.timeout)

    def _compare_given(self) -> None:
        """Once: a member that was not given a group would wait for the others in one of its own."""
        given = [set(map(tuple, each)) for each in self.all_gather_object(sorted(map(list, self._given)))]
        for ranks in sorted({ranks for each in given for ranks in each}):
            without = [rank for rank in ranks if ranks not in given[rank]]
            if without:
                raise PlatformError(
                    f"groups= of TorchPlatform has the group of ranks {ranks}, but not on ranks {without}"
                )
        self._groups |= {ranks: RankGroup(ranks, gloo) for ranks, gloo in self._given.items()}
        self._compared = True

    @cached_property
    def _everybody(self) -> GlooGroup:
        group = self._group(tuple(range(self.world_size))).gloo
        if group is None:
            raise PlanError("a world of one has nobody to talk to: its ranks are a SingleRank")
        return group

    def _group(self, ranks: tuple[int, ...]) -> RankGroup:
        """The group of `ranks`, made once, by its members only. It takes connections, but no device memory."""
        known = self._groups.get(ranks)
        if known is None:
            if ranks != tuple(sorted(set(ranks))) or ranks[-1] >= self.world_size:
                raise PlanError(f"a group is a sorted set of ranks below {self.world_size}, not {ranks}")
            known = self._groups[ranks] = RankGroup(ranks, self._connect(ranks) if len(ranks) > 1 else None)
        return known

    def _connect(self, ranks: tuple[int, ...]) -> GlooGroup:
        store = self.key_value_store
        return GlooGroup.connect(store, store.own_address, ranks, ranks.index(self._rank), lambda: self.timeout)
