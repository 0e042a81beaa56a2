"""From tensors to a description, and to the boxes that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from hyper_ckpt.contracts.planner import OwnBoxes, PlanContext
from hyper_ckpt.contracts.platform import LocalShard, TensorDescription, Tensors
from hyper_ckpt.description import (
    Description,
    RankPart,
    Structure,
    StructureBuilder,
    TensorRecord,
    pack_ranks,
)
from hyper_ckpt.errors import UnsupportedStateError
from hyper_ckpt.latest import Latest
from hyper_ckpt.layout import Boxes, MeshLayout


def describe_tensor(name: str, value: Any, context: PlanContext) -> TensorDescription:
    """Describes one tensor; errors name it."""
    try:
        description = context.tensors.describe(value)
    except UnsupportedStateError as error:
        raise type(error)(f"{name!r}: {error}") from error
    if description is None:
        raise UnsupportedStateError(f"{name!r}: {type(value).__name__} is not a tensor of this platform")
    return description


def local_shards(name: str, value: Any, context: PlanContext) -> list[LocalShard]:
    """The shards of one tensor; errors name it."""
    try:
        return context.tensors.local_shards(value)
    except UnsupportedStateError as error:
        raise type(error)(f"{name!r}: {error}") from error


def describe_all(tensors: Mapping[str, Any], context: PlanContext) -> list[TensorDescription]:
    """Describes many tensors; errors name the first that cannot be."""
    try:
        found = [d for d in map(context.tensors.describe, tensors.values()) if d is not None]
    except UnsupportedStateError:
        found = []
    if len(found) == len(tensors):
        return found
    return [describe_tensor(name, value, context) for name, value in tensors.items()]


def own_boxes(tensors: Mapping[str, Any], context: PlanContext) -> OwnBoxes:
    """The boxes that this rank holds of many tensors, empty ones included."""
    boxes: OwnBoxes = []
    for name, value in tensors.items():
        plain = context.tensors.plain(value)
        if plain is not None:
            shape = plain.description.shape
            boxes.append((name, (0,) * len(shape), shape))
        else:
            boxes += [(name, s.offsets, s.sizes) for s in local_shards(name, value, context)]
    return boxes


class _Described(NamedTuple):
    """What was described: by its names and signatures it is known again. `description` is without fingerprints;
    `replicated` are the tensors that have one, and whether they are explicit boxes."""

    names: list[str]
    signatures: list[Hashable]
    description: Description
    replicated: list[tuple[str, bool]]


def describe(tensors: Mapping[str, Any], skeleton: bytes, context: PlanContext, *, saving: bool) -> Description:
    """Describes a rank's tensors; of a state that is as it was at an earlier save, only the contents.

    Args:
        tensors: by name.
        skeleton: canonical form of the state around them.
        saving: take fingerprints of tensors that may have replicas, so that differing ones are found, and
            refuse tensors without memory.
    """
    names = sorted(tensors)
    if not saving:
        return _describe(names, tensors, skeleton, context, saving=False)[0]
    signatures = [context.tensors.signature(tensors[name]) for name in names]
    known: Latest[bytes, _Described] = context.memo.setdefault("described", Latest())
    found = known.get(skeleton)
    if found is None or found[:2] != (names, signatures):
        found = _Described(names, signatures, *_describe(names, tensors, skeleton, context, saving=True))
    if None not in signatures:
        known.put(skeleton, found)
    if not found.replicated:
        return found.description
    prints = {
        name: _fingerprint(local_shards(name, tensors[name], context), listed, context.tensors)
        for name, listed in found.replicated
    }
    return found.description.with_fingerprints(prints)


def _describe(
    names: list[str], tensors: Mapping[str, Any], skeleton: bytes, context: PlanContext, *, saving: bool
) -> tuple[Description, list[tuple[str, bool]]]:
    """The last two of `_Described`."""
    builder = StructureBuilder()
    records: list[TensorRecord] = []
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    replicated = []
    tensors = {name: tensors[name] for name in names}
    for number, (name, description) in enumerate(zip(names, describe_all(tensors, context), strict=True)):
        if saving and not description.has_memory:
            raise UnsupportedStateError(f"{name!r} is only described (on the meta device) and holds nothing to save")
        if saving and description.save_refusal is not None:
            raise UnsupportedStateError(f"{name!r}: {description.save_refusal}")
        records.append(builder.record(name, description.dtype, description.shape, description.layout))
        if isinstance(description.layout, Boxes):
            boxes += [(number, offsets, sizes) for offsets, sizes in description.layout.boxes]
        if saving and _may_have_replicas(description, context.world_size):
            replicated.append((name, isinstance(description.layout, Boxes)))
    part = RankPart(
        tuple(pack_ranks(m) for m in builder.meshes),
        tuple(boxes),
        (),
        tuple(find_ties(tensors, context).items()),
        tuple([name for name, value in tensors.items() if _is_empty(name, value, context)]),
    )
    found = Description(Structure(tuple(records), builder.layouts, skeleton), part, (b"",) * len(records))
    return found, replicated


def _is_empty(name: str, value: Any, context: PlanContext) -> bool:
    """Whether this rank holds no element of it."""
    return context.tensors.plain(value) is None and all(0 in s.sizes for s in local_shards(name, value, context))


def find_ties(tensors: Mapping[str, Any], context: PlanContext) -> dict[str, str]:
    """Names whose non-empty shards are the same elements of the same memory, each with the first such name."""
    full = {name: value for name, value in tensors.items() if not _is_empty(name, value, context)}
    plain = [*map(context.tensors.plain, full.values())]
    if len({each.address for each in plain if each is not None}) == len(full):  # mostly: all are somewhere else
        return {}
    names_of: dict[object, list[str]] = {}
    storage_key = context.tensors.storage_key
    for (name, value), description in zip(full.items(), describe_all(full, context), strict=True):
        keys = [(s.offsets, storage_key(s)) for s in local_shards(name, value, context) if 0 not in s.sizes]
        if keys and all([key is not None for _, key in keys]):  # noqa: C419  # a generator takes twice as long
            # The global shape belongs to it: a shard of one tensor may be all of another.
            names_of.setdefault((description.shape, *keys), []).append(name)
    tied = [sorted(names) for names in names_of.values() if len(names) > 1]
    return dict(sorted([(name, first) for first, *others in tied for name in others]))


def _fingerprint(shards: list[LocalShard], listed: bool, tensors: Tensors) -> bytes:
    """Of explicit boxes each has its own: ranks may share some of them."""
    if not listed:
        return tensors.fingerprint(shards)
    full = sorted((s for s in shards if 0 not in s.sizes), key=lambda s: (s.offsets, s.sizes))
    return b"".join(tensors.fingerprint([s]) for s in full)


def _may_have_replicas(description: TensorDescription, world_size: int) -> bool:
    layout = description.layout
    if isinstance(layout, MeshLayout):
        # A mesh smaller than the world may have a twin elsewhere.
        parts = [n for n, p in zip(layout.mesh.shape, layout.placements, strict=True) if hasattr(p, "dim")]
        return math.prod(parts) < world_size
    return world_size > 1
