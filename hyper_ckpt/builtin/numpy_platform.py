"""The numpy platform: one process, host memory, no framework."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.host_stager import HostStager
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.platform import ByteBuffer, Done, KeyValueStore, Pending, Platform, Ranks
from hyper_ckpt.errors import PlatformError
from hyper_ckpt.key_value.in_process import InProcessKeyValueStore


class SingleRank(Ranks):
    """A world of one: nothing travels."""

    def __init__(self) -> None:
        self._key_value_store = InProcessKeyValueStore()

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def key_value_store(self) -> KeyValueStore:
        return self._key_value_store

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        if parts is None or len(parts) != 1:
            raise ValueError("rank 0 of a world of one scatters exactly one part")
        return parts[0]

    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        if src != 0:
            raise ValueError(f"a world of one has no rank {src}")
        return Done()

    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        return [ranks if ranks == (0,) else None for ranks in rank_sets]


class OfflineRanks(Ranks):
    """One rank of a world whose ranks never talk: converters, tests, jobs of one process per node without a network.

    Args:
        rank: this rank's number.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        rank, world_size = operator.index(rank), operator.index(world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1, not {rank} of {world_size}")
        self._rank, self._world_size = rank, world_size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def key_value_store(self) -> KeyValueStore:
        raise self._silent

    def all_gather_object(self, value: Any) -> list[Any]:
        raise self._silent

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        raise self._silent

    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        raise self._silent

    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        raise self._silent

    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        raise self._silent

    @property
    def _silent(self) -> PlatformError:
        return PlatformError(
            f"rank {self._rank} of {self._world_size} was only given as a number, there is no process group to talk "
            "through: pass use_collectives=False"
        )


class NumpyPlatform(Platform):
    """numpy arrays, and `ShardedTensor`s of them.

    Args:
        ranks: the ranks it belongs to; None makes them from `rank` and `world_size`.
        rank: which rank of `world_size` this process plays, for saves and loads with `use_collectives=False`.
        world_size: number of ranks; 1 is a world of its own, in which everything works.
    """

    def __init__(self, ranks: Ranks | None = None, *, rank: int = 0, world_size: int = 1) -> None:
        if ranks is None:
            ranks = OfflineRanks(rank, world_size) if (rank, world_size) != (0, 1) else SingleRank()
        tensors = CompositeTensors([NumpyTensors()])
        super().__init__("numpy", ranks, tensors, HostStager(tensors))
