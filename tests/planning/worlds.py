"""Descriptions and worlds made without ranks that talk: what `Operation.exchange` gives on rank 0."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hyper_ckpt.agreement import Operation
from hyper_ckpt.columns import Columns
from hyper_ckpt.contracts.planner import PlanContext
from hyper_ckpt.contracts.platform import Platform, TensorDescription, Tensors
from hyper_ckpt.description import Description, World, with_base_load
from hyper_ckpt.layout import Layout
from hyper_ckpt.planning.save import SavePolicy
from hyper_ckpt.planning.share import table_of
from hyper_ckpt.planning.standard import StandardSavePlanner
from hyper_ckpt.testing.world import run_world

Spec = tuple[str, tuple[int, ...], Layout]
"""dtype, shape, layout."""


class Specs(Tensors):
    """Tensors that are nothing but their description."""

    def describe(self, value: Any) -> TensorDescription:
        return TensorDescription(*value)

    def local_shards(self, value: Any) -> list[Any]:
        return []

    def fingerprint(self, shards: Any) -> bytes:
        return b"12345678"

    def unused(self, *_: Any) -> Any:
        raise NotImplementedError

    host_view = writable = storage_key = empty = unused


def describe(tensors: Mapping[str, Spec], rank: int, world_size: int, skeleton: bytes = b"") -> Description:
    return StandardSavePlanner().build_local_plan(tensors, skeleton, PlanContext(Specs(), rank, world_size))


def world_of(world_size: int, of_rank: Callable[[int], Mapping[str, Spec]]) -> World:
    """What the ranks know of each other, as rank 0 has it."""

    def job(platform: Platform) -> World:
        rank = platform.ranks.rank
        return Operation(platform.ranks, 0, 20.0).exchange(describe(of_rank(rank), rank, world_size))

    return run_world(world_size, job)[0]


def plan(world: World, policy: SavePolicy | None = None) -> Columns:
    """The global plan, after proving that every rank plans its own part of it by itself."""
    planner = StandardSavePlanner(policy)
    loose = planner.loose_plan(world)
    load = np.bincount(loose.rank, loose.nbytes(), world.world_size).astype(np.int64)
    world = with_base_load(world, load)
    columns = planner.build_global_plan(world)
    for rank in range(world.world_size):
        parts = Columns.unpack(table_of(world), loose.take(loose.rank == rank).pack())
        assert planner.finalize_plan(world, parts, rank).pack() == columns.take(columns.rank == rank).pack(), rank
    return columns


def bytes_per_rank(columns: Columns, world_size: int) -> list[int]:
    return np.bincount(columns.rank, columns.nbytes(), world_size).astype(np.int64).tolist()
