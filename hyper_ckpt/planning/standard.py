"""The planners that `save` and `load` use unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_ckpt.columns import Columns, TensorTable
from hyper_ckpt.contracts.planner import LoadPlanner, PlanContext, SavePlanner
from hyper_ckpt.contracts.platform import LocalShard
from hyper_ckpt.description import Description, World
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.planning.describe import describe, local_shards
from hyper_ckpt.planning.load import OwnBoxes, plan_alone, plan_shared
from hyper_ckpt.planning.save import SavePolicy, check_cover, join, plan_lines, plan_loose


class StandardSavePlanner(SavePlanner):
    """Saves every tensor; replicas are stored once and shared out between their holders.

    Args:
        policy: how replicas are stored; `save` builds it from its own arguments.
    """

    def __init__(self, policy: SavePolicy | None = None) -> None:
        self._policy = policy or SavePolicy()

    def identity(self) -> str:
        return f"{type(self).__name__}({self._policy})"

    def build_local_plan(self, tensors: Mapping[str, Any], skeleton: bytes, context: PlanContext) -> Description:
        return describe(tensors, skeleton, context, saving=True)

    def loose_plan(self, world: World) -> Columns:
        return plan_loose(world, self._policy)

    def build_global_plan(self, world: World) -> Columns:
        columns = join(plan_lines(world, self._policy), plan_loose(world, self._policy))
        check_cover(columns)
        return columns

    def finalize_plan(self, world: World, loose: Columns, rank: int) -> Columns:
        return join(plan_lines(world, self._policy, rank), loose)

    def get_data(self, tensors: Mapping[str, Any], name: str, context: PlanContext) -> list[LocalShard]:
        return local_shards(name, tensors[name], context)


class StandardLoadPlanner(LoadPlanner):
    """Fills every target that the checkpoint has; boxes that several ranks want may be read once."""

    def identity(self) -> str:
        return type(self).__name__

    def build_local_plan(
        self, tensors: Mapping[str, Any], skeleton: bytes, manifest: Manifest, context: PlanContext
    ) -> Description:
        return describe(tensors, skeleton, context, saving=False)

    def build_global_plan(self, world: World, rank: int, boxes: OwnBoxes, max_bytes: int) -> Columns:
        return plan_shared(world, rank, boxes, max_bytes)

    def finalize_plan(self, description: Description, rank: int, boxes: OwnBoxes) -> Columns:
        records = description.structure.tensors
        table = TensorTable.of([(r.name, r.dtype, r.shape) for r in records])
        return plan_alone(table, rank, boxes)

    def acquire_tensor(self, tensors: Mapping[str, Any], name: str, context: PlanContext) -> Any:
        value = tensors[name]
        description = context.tensors.describe(value)
        return value if description is None or description.has_memory else context.tensors.empty(description, value)

    def apply_tensor(self, name: str, tensor: Any) -> Any:
        return tensor
