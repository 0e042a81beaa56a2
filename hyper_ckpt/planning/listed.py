"""Items that planners list, checked: errors name the item."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_ckpt.box import offsets_inside
from hyper_ckpt.contracts.planner import PlanContext
from hyper_ckpt.contracts.platform import LocalShard
from hyper_ckpt.errors import PlanError
from hyper_ckpt.items import LoadPlan, ReadItem, SavePlan, WriteItem
from hyper_ckpt.metadata import MetadataIndex
from hyper_ckpt.planning.describe import local_shards

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def items_of(plan: Any, kind: type[SavePlan] | type[LoadPlan], method: str) -> Sequence[Any]:
    """The items of a plan that an author's `method` made.

    Raises:
        PlanError: it is no such plan, or lists something else.
    """
    if not isinstance(plan, kind):
        raise PlanError(f"{method} gave a {type(plan).__name__} where a {kind.__name__} is wanted")
    wanted = WriteItem if kind is SavePlan else ReadItem
    if not isinstance(plan.items, list | tuple):
        raise PlanError(f"{method} gave a {kind.__name__} of a {type(plan.items).__name__}: its items are a tuple")
    items: list[Any] = list(plan.items)
    wrong = [item for item in items if not isinstance(item, wanted)]
    if wrong:
        raise PlanError(
            f"{method} listed a {type(wrong[0]).__name__}: the items of a {kind.__name__} are {wanted.__name__}"
        )
    return items


def box_of(item: WriteItem | ReadItem) -> Box:
    """Offsets and sizes as plain numbers; no offset at all is the tensor's begin.

    Raises:
        PlanError: they are no box.
    """
    index: object = item.index
    if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str):
        raise PlanError(f"the index of an item is a MetadataIndex with a name, not {index!r}")
    name, offset = item.index.fqn, item.index.offset
    try:
        sizes = tuple(map(operator.index, item.sizes))
        offsets = (0,) * len(sizes) if offset is None else tuple(map(operator.index, offset))
    except TypeError as error:
        raise PlanError(f"the item for {name!r} at {offset} of {item.sizes}: offsets and sizes are integers") from error
    if len(offsets) != len(sizes) or min(sizes, default=0) < 0:
        raise PlanError(f"{shown(name, (offsets, sizes))} is no box: give one offset and one size for each dimension")
    return offsets, sizes


def shown(name: str, box: Box) -> str:
    """How errors call an item."""
    return f"the item for {name!r} at {box[0]} of sizes {box[1]}"


def inside(box: Box, outer: Box) -> bool:
    """Whether a box, of whatever number of dimensions, lies in another one."""
    return len(box[0]) == len(outer[0]) and offsets_inside(*box, *outer) is not None


def held(item: WriteItem | ReadItem, tensors: Mapping[str, Any], context: PlanContext) -> tuple[str, Box, LocalShard]:
    """The tensor, the box, and the local shard that it lies in.

    Raises:
        PlanError: this rank has no such tensor, or not that box of it.
    """
    box = box_of(item)
    name = item.index.fqn
    if name not in tensors:
        raise PlanError(f"{shown(name, box)}: rank {context.rank} has no tensor of this name")
    shards = local_shards(name, tensors[name], context)
    for shard in shards:
        if inside(box, (shard.offsets, shard.sizes)):
            return name, box, shard
    own = ", ".join(f"{s.sizes} at {s.offsets}" for s in shards[:4]) or "nothing"
    raise PlanError(f"{shown(name, box)} lies in no local shard: rank {context.rank} holds {own} of it")
