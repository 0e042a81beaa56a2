"""What a rank says of its state, and what a world of ranks said.

A description has a *structure*, digested without any rank number so that thousands of ranks share
one, and a small *rank part*. Both travel as msgpack.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import xxhash

from hyper_ckpt.box import IntArray
from hyper_ckpt.layout import Mesh, MeshLayout, Placement, Replicate, Replicated, Shard, sharded_dims

REPLICATED, EXPLICIT = -1, -2


class LayoutRecord(msgspec.Struct, frozen=True, array_like=True):
    """A layout without ranks: `mesh` counts in the rank's own mesh table, or is REPLICATED or EXPLICIT.

    A placement is None for Replicate, else (dim, sizes or None).
    """

    mesh: int
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[tuple[int, tuple[int, ...] | None] | None, ...] = ()
    order: tuple[int, ...] = ()

    def decoded(self) -> tuple[Placement, ...]:
        """The placements as layout values."""
        return tuple(Replicate() if p is None else Shard(*p) for p in self.placements)

    def sharded_dims(self) -> tuple[int, ...]:
        """Mesh dimensions along which ranks hold different boxes."""
        return sharded_dims(self.mesh_shape, self.decoded())


class TensorRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor; `layout` counts in the structure's layouts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: int


class Structure(msgspec.Struct, frozen=True, array_like=True):
    """Everything about a state that ranks of one kind share: tensors sorted by name, layouts, containers.

    `skeleton` is the canonical form of the nested state without plain values.
    """

    tensors: tuple[TensorRecord, ...]
    layouts: tuple[LayoutRecord, ...]
    skeleton: bytes


class RankPart(msgspec.Struct, frozen=True, array_like=True):
    """What differs from rank to rank.

    Args:
        meshes: the ranks of each mesh of the table, see `pack_ranks`.
        boxes: explicit boxes as (tensor number, offsets, sizes).
        fingerprints: per (mesh, sharded mesh dimensions), a digest over its tensors' fingerprints.
        ties: (name, first name) of tensors that are the same memory.
        empty: names of which this rank holds no element, so that it cannot say.
    """

    meshes: tuple[tuple[int, ...], ...] = ()
    boxes: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...] = ()
    fingerprints: tuple[tuple[int, tuple[int, ...], bytes], ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    empty: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """One rank's description of its state.

    `fingerprints` are those of the single tensors in the structure's order: 8 bytes each, of explicit boxes 8 for
    each that is not empty, sorted by offsets and sizes; none where a tensor cannot have a replica. They travel only
    where the digests in `rank_part` differ.
    """

    structure: Structure
    rank_part: RankPart
    fingerprints: tuple[bytes, ...] = ()

    @functools.cached_property
    def encoded(self) -> bytes:
        """The structure as bytes."""
        return msgspec.msgpack.encode(self.structure)

    def with_fingerprints(self, by_name: Mapping[str, bytes]) -> Description:
        """The same state with other contents."""
        part = msgspec.structs.replace(self.rank_part, fingerprints=line_digests(self.structure, by_name))
        other = Description(self.structure, part, tuple([by_name.get(r.name, b"") for r in self.structure.tensors]))
        vars(other)["encoded"] = self.encoded
        return other

    @property
    def digest(self) -> bytes:
        """16 bytes, equal for ranks of one structure."""
        return xxhash.xxh3_128_digest(self.encoded)


@dataclass(frozen=True)
class ExplicitBoxes:
    """Explicit boxes of all ranks, as columns: row i is a box of tensor `names[i]` on rank `rank[i]`."""

    names: tuple[str, ...] = ()
    rank: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    offsets: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class World:
    """What all ranks described.

    Args:
        world_size: number of ranks.
        structures: the distinct ones, in order of their first rank.
        class_of: (world_size,) the structure of each rank.
        meshes: per structure and mesh number, the ranks of every distinct mesh: (meshes, mesh size).
        boxes: explicit boxes; only rank 0 has them.
        ties: names that are the same memory as another on every rank that holds any of it, with that name.
        conflicts: tensors whose replicas differ: not to be split between ranks. In the world of a load, names that are
            another tensor on each rank: not to be shared.
        groups: of each tensor whose replicas differ, the sets of ranks that hold equal ones and together all of it;
            none where ranks hold irregular parts, so that no such sets are.
        holders: of a variant of such a tensor, which is a tensor of its own, the ranks that hold it. Of those that
            describe any other tensor, all hold it.
        base_load: (world_size,) bytes that each rank writes of explicit boxes, for levelling.
        key: equal for worlds that are equal but for `boxes` and `base_load`.
        memo: what was worked out of all that `key` stands for, so that it is not worked out again: worlds of one key
            may share it.
    """

    world_size: int
    structures: tuple[Structure, ...]
    class_of: IntArray
    meshes: tuple[tuple[IntArray, ...], ...]
    boxes: ExplicitBoxes = field(default_factory=ExplicitBoxes)
    ties: Mapping[str, str] = field(default_factory=dict)
    conflicts: frozenset[str] = frozenset()
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    holders: Mapping[str, IntArray] = field(default_factory=dict)
    base_load: IntArray | None = None
    key: bytes = b""
    memo: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)


def without(world: World, names: Collection[str]) -> World:
    """The world without some tensors."""
    if not names:
        return world
    key = ("without", frozenset(names))
    if key not in world.memo:
        structures = tuple(
            Structure(tuple(t for t in s.tensors if t.name not in names), s.layouts, s.skeleton)
            for s in world.structures
        )
        digest = xxhash.xxh3_128_digest(world.key + msgspec.msgpack.encode(sorted(names)))
        world.memo[key] = (structures, digest, {})
    # Not the world itself: others with this memo may have other boxes.
    structures, digest, memo = world.memo[key]
    return dataclasses.replace(world, structures=structures, key=digest, memo=memo)


def with_base_load(world: World, load: IntArray) -> World:
    """The world with the bytes that ranks write of explicit boxes."""
    return dataclasses.replace(world, base_load=load)


_REPLICATED, _EXPLICIT = LayoutRecord(REPLICATED), LayoutRecord(EXPLICIT)


class StructureBuilder:
    """Collects tensors into a structure: numbers meshes and layouts."""

    def __init__(self) -> None:
        self._meshes: dict[Mesh, int] = {}
        self._layouts: dict[LayoutRecord, int] = {}

    def record(self, name: str, dtype: str, shape: tuple[int, ...], layout: object) -> TensorRecord:
        """The record of one tensor. Call in name order, so that the numbers are the same on all ranks."""
        if isinstance(layout, MeshLayout):
            mesh = self._meshes.setdefault(layout.mesh, len(self._meshes))
            placements = tuple((p.dim, p.sizes) if isinstance(p, Shard) else None for p in layout.placements)
            row = LayoutRecord(mesh, layout.mesh.shape, placements, layout.order)
        else:
            row = _REPLICATED if isinstance(layout, Replicated) else _EXPLICIT
        return TensorRecord(name, dtype, shape, self._layouts.setdefault(row, len(self._layouts)))

    @property
    def layouts(self) -> tuple[LayoutRecord, ...]:
        """The distinct layouts, numbered."""
        return tuple(self._layouts)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The distinct meshes, numbered."""
        return tuple(self._meshes)


def pack_ranks(mesh: Mesh) -> tuple[int, ...]:
    """The ranks of a mesh as (0, base, *strides) where they are regular, else (1, *ranks)."""
    grid = np.asarray(mesh.ranks, np.int64).reshape(mesh.shape)
    strides = [0] * grid.ndim
    for d, length in enumerate(mesh.shape):
        if length > 1:
            strides[d] = int(np.take(grid, 1, axis=d).flat[0] - grid.flat[0])
    if np.array_equal(_regular(mesh.shape, int(grid.flat[0]), strides), grid):
        return (0, int(grid.flat[0]), *strides)
    return (1, *mesh.ranks)


def unpack_ranks(packed: Sequence[int], shape: tuple[int, ...]) -> IntArray:
    """The inverse of `pack_ranks`, row-major."""
    if packed[0] == 1:
        return np.asarray(packed[1:], np.int64)
    return _regular(shape, packed[1], packed[2:]).reshape(-1)


def _regular(shape: tuple[int, ...], base: int, strides: Sequence[int]) -> IntArray:
    grid = np.full(shape, base, np.int64)
    for d, stride in enumerate(strides):
        step = np.arange(shape[d], dtype=np.int64) * stride
        grid += step.reshape([-1 if i == d else 1 for i in range(len(shape))])
    return grid


def line_digests(
    structure: Structure, fingerprints: Mapping[str, bytes]
) -> tuple[tuple[int, tuple[int, ...], bytes], ...]:
    """One digest per set of holders: tensors of one mesh, cut along the same mesh dimensions."""
    parts: dict[tuple[int, tuple[int, ...]], list[bytes]] = {}
    for record in structure.tensors:
        if record.name in fingerprints:
            layout = structure.layouts[record.layout]
            parts.setdefault((layout.mesh, layout.sharded_dims()), []).append(fingerprints[record.name])
    return tuple((mesh, dims, xxhash.xxh3_64_digest(b"".join(rows))) for (mesh, dims), rows in parts.items())
