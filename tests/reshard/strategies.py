"""Worlds that hypothesis draws: tensors, and how they lie over ranks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hyper_ckpt.box import cut
from hyper_ckpt.layout import Mesh, MeshLayout, Placement, Replicate, Replicated, Shard
from hyper_ckpt.testing.meshed import distribute
from hyper_ckpt.values import ShardedTensor

from .worlds import State, filled, poisoned

DTYPES = ["float32", "bfloat16", "float64", "int8", "bool", "complex128", "float8_e4m3fn"]
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class OnMeshes:
    """On congruent disjoint meshes. Other ranks hold an empty part of it, or nothing."""

    meshes: tuple[Mesh, ...]
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    on_device: bool
    outsiders: bool

    def part(self, whole: np.ndarray, rank: int) -> Any:
        mesh = next((m for m in self.meshes if rank in m.ranks), self.meshes[0])
        if rank not in mesh.ranks and not self.outsiders:
            return None
        return distribute(whole, MeshLayout(mesh, self.placements, self.order), rank, on_device=self.on_device)


@dataclass(frozen=True)
class Everywhere:
    """Whole on some ranks."""

    ranks: frozenset[int]
    on_device: bool

    def part(self, whole: np.ndarray, rank: int) -> Any:
        return distribute(whole, Replicated(), rank, on_device=self.on_device) if rank in self.ranks else None


@dataclass(frozen=True)
class ByHand:
    """Boxes, each on some ranks."""

    boxes: tuple[tuple[Box, frozenset[int]], ...]

    def part(self, whole: np.ndarray, rank: int) -> Any:
        own = [box for box, ranks in self.boxes if rank in ranks]
        if not own:
            own = [((0,) * whole.ndim, (0, *whole.shape[1:]))] if whole.ndim else []
        shards = [(cut(whole, *box).copy(), box[0]) for box in own]
        return ShardedTensor(shards, whole.shape) if shards else None


Spread = OnMeshes | Everywhere | ByHand


@st.composite
def meshes(draw: st.DrawFn, world: int) -> tuple[Mesh, ...]:
    shape = []
    for _ in range(draw(st.integers(1, 3))):
        shape.append(draw(st.integers(1, max(world // int(np.prod(shape)), 1))))
    size = int(np.prod(shape))
    ranks = draw(st.permutations(range(world))) if draw(st.booleans()) else list(range(world))
    count = draw(st.integers(1, world // size))
    return tuple(Mesh(tuple(shape), tuple(ranks[i * size : (i + 1) * size])) for i in range(count))


@st.composite
def cuts(draw: st.DrawFn, length: int, parts: int) -> tuple[int, ...]:
    """`parts` sizes, zeros among them, that sum to `length`."""
    at = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    return tuple(np.diff([0, *at, length]).tolist())


@st.composite
def on_meshes(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> OnMeshes:
    chosen = draw(meshes(world))
    mesh_shape = chosen[0].shape
    order = tuple(draw(st.permutations(range(len(mesh_shape)))))
    placements: list[Placement] = [Replicate()] * len(mesh_shape)
    lengths: list[int | None] = list(shape)  # None: not the same at all coordinates
    for m in order:
        if not shape or draw(st.integers(0, 3)) == 0:
            continue
        dim, parts = draw(st.integers(0, len(shape) - 1)), mesh_shape[m]
        length = lengths[dim]
        sizes = draw(st.none() | cuts(length, parts)) if length is not None else None
        placements[m] = Shard(dim, sizes)
        even = length is not None and (length % parts == 0 if sizes is None else len(set(sizes)) == 1)
        lengths[dim] = length // parts if even and length is not None else None
    plain_order = order if order != tuple(range(len(order))) or draw(st.booleans()) else ()
    return OnMeshes(chosen, tuple(placements), plain_order, draw(st.booleans()), draw(st.booleans()))


@st.composite
def by_hand(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> ByHand:
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        low, high, moved = list(sizes), list(sizes), list(offsets)
        low[dim], high[dim], moved[dim] = at, sizes[dim] - at, offsets[dim] + at
        boxes += [(offsets, tuple(low)), (tuple(moved), tuple(high))]
    holders = st.frozensets(st.integers(0, world - 1), min_size=1, max_size=3)
    return ByHand(tuple((box, draw(holders)) for box in boxes))


def spreads(shape: tuple[int, ...], world: int) -> st.SearchStrategy[Spread]:
    some = st.frozensets(st.integers(0, world - 1), min_size=1)
    everywhere = st.builds(Everywhere, st.just(frozenset(range(world))) | some, st.booleans())
    return on_meshes(shape, world) | on_meshes(shape, world) | by_hand(shape, world) | everywhere


@dataclass(frozen=True)
class Job:
    """Tensors over a world."""

    world: int
    spread: dict[str, Spread]

    def state(self, whole: dict[str, np.ndarray], rank: int) -> State:
        parts = {name: spread.part(whole[name], rank) for name, spread in self.spread.items()}
        return {name: part for name, part in parts.items() if part is not None}

    def blank(self, whole: dict[str, np.ndarray], rank: int) -> State:
        return self.state({name: poisoned(a.shape, a.dtype.name) for name, a in whole.items()}, rank)


tensors = st.builds(
    lambda shape, dtype, seed: filled(tuple(shape), dtype, seed),
    st.lists(st.integers(0, 12), max_size=3) | st.lists(st.integers(3, 30), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
wholes = st.lists(tensors, min_size=1, max_size=4).map(lambda arrays: {f"t{i}": a for i, a in enumerate(arrays)})


@st.composite
def jobs(draw: st.DrawFn, whole: dict[str, np.ndarray]) -> Job:
    world = draw(st.integers(1, 6))
    return Job(world, {name: draw(spreads(array.shape, world)) for name, array in whole.items()})
