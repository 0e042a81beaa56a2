"""Which replicas differ, by what ranks said of their contents, and which ranks hold equal ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash

from hyper_ckpt.description import (
    EXPLICIT,
    REPLICATED,
    ExplicitBoxes,
    LayoutRecord,
    RankPart,
    Structure,
    TensorRecord,
    World,
    unpack_ranks,
)
from hyper_ckpt.layout import expand
from hyper_ckpt.state.names import variant_name
from hyper_ckpt.state.variants import Groups, label_of

Box = tuple[tuple[int, ...], tuple[int, ...]]
Said = tuple[tuple[bytes, ...], RankPart]
"""What a rank says of its contents: the fingerprints of its structure's tensors, in order, and its part."""


def differing(said: Sequence[Said], world: World) -> set[str]:
    """The names of tensors whose replicas differ, and of all that is the same memory as one of them.

    Args:
        said: of every rank.
    """
    seen: dict[tuple[object, ...], bytes] = {}
    out = set()
    several = _laid_differently(world)
    for rank, (prints, part) in enumerate(said):
        structure = world.structures[world.class_of[rank]]
        listed = _listed(part)
        for number, (record, fingerprint) in enumerate(zip(structure.tensors, prints, strict=True)):
            layout = structure.layouts[record.layout]
            cells: list[Any] = listed.get(number, [])
            if layout.mesh != EXPLICIT and fingerprint:
                cells = (
                    _boxes_of(record, layout, part, rank)
                    if record.name in several
                    else [cell(structure, part, layout.mesh, layout.sharded_dims(), rank)]
                )
            for i, each in enumerate(cells):
                own = fingerprint[8 * i : 8 * i + 8]
                if own and seen.setdefault((record.name, each), own) != own:
                    out.add(record.name)
    return out | {name for pair in world.ties.items() if out & {*pair} for name in pair}


def groups_of(said: Sequence[Said], world: World, names: Collection[str]) -> dict[str, Groups]:
    """Of each of these tensors, the sets of ranks that hold equal replicas: see `World.groups`."""
    held: dict[str, list[_Held]] = {name: [] for name in names}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, (prints, part) in enumerate(said):
        structure = world.structures[world.class_of[rank]]
        listed = _listed(part)
        for number, record in enumerate(structure.tensors):
            if record.name in held:
                shapes[record.name] = record.shape
                own = _held(record, structure, part, rank, listed.get(number, []), prints[number])
                held[record.name].append(own)
    return {name: _grouped(each, math.prod(shapes[name])) for name, each in held.items()}


def cell(structure: Structure, part: RankPart, mesh: int, dims: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """What tells sets of holders apart: the coordinates along the sharded mesh dimensions."""
    if mesh < 0:
        return ()
    shape = next(x.mesh_shape for x in structure.layouts if x.mesh == mesh)
    coordinate = _coordinate(part, mesh, shape, rank)
    return (-1, rank) if coordinate is None else (*dims, *(coordinate[d] for d in dims))


def with_variants(world: World) -> World:
    """The world in which each variant of a tensor whose replicas differ is a tensor of its own, held by its ranks."""
    if not world.groups:
        return world
    if "variants" not in world.memo:
        world.memo["variants"] = _Variants(world)
    made: _Variants = world.memo["variants"]
    explicit = world.boxes
    names = tuple(
        variant_name(name, label) if (label := label_of(world.groups.get(name, ()), rank)) is not None else name
        for name, rank in zip(explicit.names, explicit.rank.tolist(), strict=True)
    )
    return dataclasses.replace(
        world,
        structures=made.structures,
        ties=made.ties,
        conflicts=frozenset(made.holders),
        holders=made.holders,
        key=made.key,
        memo=made.memo,
        boxes=ExplicitBoxes(names, explicit.rank, explicit.offsets, explicit.sizes),
    )


class _Variants:
    """What `with_variants` changes, made of what a world's key stands for."""

    def __init__(self, world: World) -> None:
        self.memo: dict[object, Any] = {}
        self.key = xxhash.xxh3_128_digest(b"variants" + world.key)
        self.holders = {
            variant_name(name, ranks[0]): np.array(ranks, np.int64)
            for name, groups in world.groups.items()
            for ranks in groups
        }
        self.structures = tuple(
            msgspec.structs.replace(s, tensors=tuple(t for r in s.tensors for t in self._each(r, number, world)))
            for number, s in enumerate(world.structures)
        )
        self.ties = {name: first for pair in world.ties.items() for name, first in self._tied(*pair, world.groups)}

    def _each(self, record: TensorRecord, number: int, world: World) -> Iterator[TensorRecord]:
        """The variants of a tensor that ranks of a structure hold."""
        if record.name not in world.groups:
            yield record
            return
        for ranks in world.groups[record.name]:
            if (world.class_of[list(ranks)] == number).any():
                yield msgspec.structs.replace(record, name=variant_name(record.name, ranks[0]))

    def _tied(self, name: str, first: str, groups: Mapping[str, Groups]) -> Iterator[tuple[str, str]]:
        if name not in groups:
            yield name, first
            return
        for ranks in groups[name]:
            same = next((each for each in groups[first] if not set(ranks).isdisjoint(each)), None)
            if same is not None:
                yield variant_name(name, ranks[0]), variant_name(first, same[0])


@dataclass(frozen=True)
class _Held:
    """What a rank holds of a tensor: boxes with fingerprints, none empty; and something that is equal for ranks which
    together hold all of it, None where its boxes are listed one by one, and are only a part."""

    rank: int
    boxes: tuple[tuple[Box, bytes], ...]
    replica: tuple[object, ...] | None


def _held(
    record: TensorRecord, structure: Structure, part: RankPart, rank: int, listed: list[Box], prints: bytes
) -> _Held:
    layout = structure.layouts[record.layout]
    boxes = listed if layout.mesh == EXPLICIT else _boxes_of(record, layout, part, rank)
    # Contents of which a rank says nothing equal nobody's.
    each = [prints[8 * i : 8 * i + 8] or b"rank %d" % rank for i in range(len(boxes))]
    replica: tuple[object, ...] | None = ("rank", rank)
    if layout.mesh == EXPLICIT and sum(math.prod(sizes) for _, sizes in boxes) != math.prod(record.shape):
        replica = None
    elif layout.mesh >= 0:
        dims = layout.sharded_dims()
        coordinate = _coordinate(part, layout.mesh, layout.mesh_shape, rank) or ()
        rest = tuple(n for d, n in enumerate(coordinate) if d not in dims)
        replica = ("mesh", part.meshes[layout.mesh], layout.mesh_shape, rest)
    return _Held(rank, tuple(zip(boxes, each, strict=True)), replica)


def _grouped(held: Sequence[_Held], elements: int) -> Groups:
    """The sets of ranks; none if some hold irregular parts."""
    holders: dict[Box, list[int]] = {}
    for own in held:
        if own.replica is None:
            for box, _ in own.boxes:
                holders.setdefault(box, []).append(own.rank)
    replicas: dict[tuple[object, ...], list[_Held]] = {}
    idle = []
    for own in held:
        replica = own.replica
        if replica is None:  # the first holders of every box are a replica, the second ones are, and so on
            places = {holders[box].index(own.rank) for box, _ in own.boxes}
            if len(places) > 1:
                return ()
            if not places:
                idle.append(own.rank)
                continue
            replica = ("listed", *places)
        replicas.setdefault(replica, []).append(own)
    equal: dict[tuple[tuple[Box, bytes], ...], list[int]] = {}
    for members in replicas.values():
        boxes = sorted(each for own in members for each in own.boxes)
        if sum(math.prod(sizes) for (_, sizes), _ in boxes) != elements:
            return ()
        equal.setdefault(tuple(boxes), []).extend(own.rank for own in members)
    groups = sorted(equal.values(), key=min)
    groups[0] += idle  # which hold nothing of any
    return tuple(sorted(tuple(sorted(ranks)) for ranks in groups))


def _listed(part: RankPart) -> dict[int, list[Box]]:
    """The explicit boxes of a rank that are not empty, by the number of the tensor, in the order of fingerprints."""
    out: dict[int, list[Box]] = {}
    for number, offsets, sizes in sorted(part.boxes):
        if 0 not in sizes:
            out.setdefault(number, []).append((offsets, sizes))
    return out


def _laid_differently(world: World) -> set[str]:
    """Names that ranks describe with different layouts: only their boxes can be compared."""
    found: dict[str, set[tuple[object, ...]]] = {}
    for structure in world.structures:
        for record in structure.tensors:
            x = structure.layouts[record.layout]
            found.setdefault(record.name, set()).add((min(x.mesh, 0), x.mesh_shape, x.placements, x.order))
    return {name for name, layouts in found.items() if len(layouts) > 1}


def _boxes_of(record: TensorRecord, layout: LayoutRecord, part: RankPart, rank: int) -> list[Box]:
    """The box that a rank holds of a tensor that is whole or on a mesh; none if it is empty."""
    offsets, sizes = (0,) * len(record.shape), record.shape
    if layout.mesh != REPLICATED:
        at = _coordinate(part, layout.mesh, layout.mesh_shape, rank)
        if at is None:
            return []
        coordinate = np.array(at, np.int64).reshape(-1, 1)
        low, lengths = expand(record.shape, layout.mesh_shape, layout.decoded(), layout.order, coordinate)
        offsets, sizes = tuple(low[0].tolist()), tuple(lengths[0].tolist())
    return [] if 0 in sizes else [(offsets, sizes)]


def _coordinate(part: RankPart, mesh: int, shape: tuple[int, ...], rank: int) -> tuple[int, ...] | None:
    """Where a rank stands in a mesh of its table; None if it does not."""
    at = np.flatnonzero(unpack_ranks(part.meshes[mesh], shape) == rank)
    return tuple(int(n) for n in np.unravel_index(int(at[0]), shape)) if len(at) else None
