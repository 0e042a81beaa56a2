"""A platform whose rank 1 dies in a collective. Imported by name, so that the ranks' processes find it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hyper_ckpt.builtin.numpy_platform import NumpyPlatform, OfflineRanks
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.testing.conformance.numpy_probe import NumpyProbe


class HalfRanks(OfflineRanks):
    def all_gather_object(self, value: Any) -> list[Any]:
        if self.rank == 1:
            os._exit(3)
        return [value] * self.world_size

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        while self.rank == 1:
            pass
        return None

    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        return [ranks if self.rank in ranks else None for ranks in rank_sets]


class HalfProbe(NumpyProbe):
    def join(self, rank: int, world_size: int, address: str, port: int) -> Platform:
        return NumpyPlatform(HalfRanks(rank, world_size))

    def run_world(self, world_size: int, fn: Any, timeout: float) -> Any:
        return None


class NeverJoins(HalfProbe):
    def join(self, rank: int, world_size: int, address: str, port: int) -> Platform:
        raise OSError(f"no route to {address}")
