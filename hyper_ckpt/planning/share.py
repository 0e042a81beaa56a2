"""Who handles what of the boxes that several ranks hold.

A *line* lays the boxes of many tensors end to end, once per group of ranks that hold the same boxes.
Each holder takes a contiguous share, so that few tensors are cut and most groups cut at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from hyper_ckpt.box import IntArray, element_counts, pad, split_units
from hyper_ckpt.columns import Columns, TensorTable
from hyper_ckpt.description import REPLICATED, LayoutRecord, World
from hyper_ckpt.errors import PlanError
from hyper_ckpt.layout import expand
from hyper_ckpt.planning.balance import water_fill

# Boxes smaller than this are never cut; it is also the largest unit that a cut may round to.
MIN_CUT_BYTES = 1 << 20


@dataclass(frozen=True)
class Line:
    """Tensors whose boxes are held by the same groups of ranks.

    Args:
        ranks: (groups, holders) sorted along the holders; the groups are disjoint.
        tensors: (T,) numbers in the table, ascending.
        offsets, sizes: per tensor, the box of each group: (groups, D). Equal geometries share arrays.
    """

    ranks: IntArray
    tensors: IntArray
    offsets: tuple[IntArray, ...]
    sizes: tuple[IntArray, ...]


@dataclass
class Rows:
    """Chunks being collected, as lists of arrays."""

    width: int
    parts: list[tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]] = field(default_factory=list)

    def add(
        self, tensor: IntArray, rank: IntArray, offsets: IntArray, sizes: IntArray, copy: IntArray, group: IntArray
    ) -> None:
        """Adds rows; empty boxes are dropped, narrow ones padded."""
        keep = (sizes > 0).all(axis=1)
        offsets, sizes = pad(offsets[keep], self.width, 0), pad(sizes[keep], self.width, 1)
        self.parts.append((tensor[keep], rank[keep], offsets, sizes, copy[keep], group[keep]))

    def columns(self, table: TensorTable, groups: tuple[tuple[int, ...], ...] = ()) -> Columns:
        """The columns, in order of tensor, offsets, copy."""
        none = np.zeros(0, np.int64)
        boxes = np.zeros((0, self.width), np.int64)
        parts = self.parts or [(none, none, boxes, boxes, none, none)]
        tensor, rank, offsets, sizes, copy, group = (np.concatenate([p[i] for p in parts]) for i in range(6))
        order = np.lexsort((*offsets.T[::-1], copy, tensor))
        return Columns(table, tensor, rank, offsets, sizes, copy, group, groups).take(order)


def table_of(world: World) -> TensorTable:
    """Every tensor that any rank described.

    Raises:
        PlanError: two ranks describe one name with different dtypes or shapes.
    """
    if "table" in world.memo:
        known: TensorTable = world.memo["table"]
        return known
    seen: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for number, structure in enumerate(world.structures):
        for record in structure.tensors:
            first = seen.setdefault(record.name, (record.dtype, record.shape, number))
            if first[:2] != (record.dtype, record.shape):
                raise PlanError(
                    f"{record.name!r} is {first[0]} {first[1]} on {_some_ranks(world, [first[2]])} but {record.dtype} "
                    f"{record.shape} on {_some_ranks(world, [number])}. "
                    "One name is one tensor: rename it, or wrap it in PerRank"
                )
    table = TensorTable.of([(name, dtype, shape) for name, (dtype, shape, _) in sorted(seen.items())])
    world.memo["table"] = table
    return table


def _some_ranks(world: World, classes: Iterable[int]) -> str:
    ranks = np.flatnonzero(np.isin(world.class_of, list(classes))).tolist()
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}{', ...' * (len(ranks) > 4)}"


def holders_by_name(world: World) -> dict[str, tuple[tuple[int, int], ...]]:
    """Per tensor name, the (structure, layout) pairs that describe it."""
    out: dict[str, tuple[tuple[int, int], ...]] = {}
    for number, structure in enumerate(world.structures):
        for record in structure.tensors:
            out[record.name] = (*out.get(record.name, ()), (number, record.layout))
    return out


def build_lines(world: World, table: TensorTable) -> tuple[list[Line], list[int]]:
    """Groups the tensors of a world into lines.

    Returns:
        The lines, fewest holders first (they have the least choice), then by first tensor; and the numbers of
        the *loose* tensors, whose boxes must be listed one by one.
    """
    if "lines" not in world.memo:
        builder = _LineBuilder(world, table)
        world.memo["lines"] = (builder.lines(), builder.loose)
    lines, loose = world.memo["lines"]
    return lines, loose


class _LineBuilder:
    def __init__(self, world: World, table: TensorTable) -> None:
        self._world, self._table = world, table
        self._stacks: dict[tuple[tuple[tuple[int, int], ...], bool], IntArray | None] = {}
        self._boxes: dict[tuple[LayoutRecord, tuple[int, ...]], tuple[IntArray, IntArray]] = {}
        self.loose: list[int] = []

    def lines(self) -> list[Line]:
        holders = holders_by_name(self._world)
        members: dict[tuple[object, ...], tuple[IntArray, list[int], list[tuple[IntArray, IntArray]]]] = {}
        ranks_of: dict[tuple[tuple[tuple[int, int], ...], tuple[int, ...]], IntArray] = {}
        for number, name in enumerate(self._table.names):
            pairs = holders[name]
            layout = self._world.structures[pairs[0][0]].layouts[pairs[0][1]]
            stack = self._stack(name, pairs)
            if stack is None:
                self.loose.append(number)
                continue
            dims = layout.sharded_dims()
            ranks = ranks_of.get((pairs, dims))
            if ranks is None:
                ranks = ranks_of[pairs, dims] = group_ranks(stack, layout.mesh_shape, dims)
            own = self._world.holders.get(name)
            if own is not None:  # of each group as many, since they hold whole replicas
                ranks = ranks[np.isin(ranks, own)].reshape(len(ranks), -1)
            # Tensors whose replicas differ stand in lines of their own, which are not shared out.
            key = (ranks.shape, ranks.tobytes(), name in self._world.conflicts)
            _, tensors, boxes = members.setdefault(key, (ranks, [], []))
            tensors.append(number)
            boxes.append(self._geometry(layout, dims, self._table.shapes[number]))
        made = [
            Line(ranks, np.array(tensors, np.int64), tuple(b[0] for b in boxes), tuple(b[1] for b in boxes))
            for ranks, tensors, boxes in members.values()
        ]
        return sorted(made, key=lambda line: (line.ranks.shape[1], int(line.tensors[0])))

    def _stack(self, name: str, pairs: tuple[tuple[int, int], ...]) -> IntArray | None:
        """(instances, mesh size) ranks that hold a tensor; None if its boxes must be listed one by one."""
        world = self._world
        partial = name in world.holders  # of a mesh that describes it, some ranks hold another variant
        if (pairs, partial) in self._stacks:
            return self._stacks[pairs, partial]
        layouts = [world.structures[c].layouts[i] for c, i in pairs]
        present = np.flatnonzero(np.isin(world.class_of, [c for c, _ in pairs]))
        stack: IntArray | None
        if all(layout.mesh == REPLICATED for layout in layouts):
            stack = present[:, None].astype(np.int64)
        elif any(x.mesh < 0 for x in layouts) or len({(x.mesh_shape, x.placements, x.order) for x in layouts}) > 1:
            stack = None
        else:
            stack = np.unique(
                np.concatenate([world.meshes[c][x.mesh] for (c, _), x in zip(pairs, layouts, strict=True)]), axis=0
            )
            absent = np.setdiff1d(stack, present)
            if len(absent) and not partial:
                raise PlanError(
                    f"{name!r} is distributed over ranks {sorted(set(stack.flat))[:8]}, but rank {int(absent[0])} of "
                    "them has no such tensor in its state: pass the same sharded tensors on every rank of their mesh"
                )
            if len(np.unique(stack)) != stack.size:
                raise PlanError(
                    f"ranks describe {name!r} on meshes that overlap without being equal: {stack[:2].tolist()}. "
                    "Build its mesh from the same ranks in the same order everywhere"
                )
        self._stacks[pairs, partial] = stack
        return stack

    def _geometry(
        self, layout: LayoutRecord, dims: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[IntArray, IntArray]:
        key = (LayoutRecord(0, layout.mesh_shape, layout.placements, layout.order), shape)
        if key not in self._boxes:
            count = _count(layout.mesh_shape, dims)
            coordinates = np.zeros((len(layout.mesh_shape), count), np.int64)
            coordinates[list(dims)] = np.indices([layout.mesh_shape[d] for d in dims]).reshape(len(dims), count)
            offsets, sizes = expand(shape, layout.mesh_shape, layout.decoded(), layout.order, coordinates)
            self._boxes[key] = (pad(offsets, self._table.width, 0), pad(sizes, self._table.width, 1))
        return self._boxes[key]


def _count(mesh_shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
    return int(np.prod([mesh_shape[d] for d in dims], dtype=np.int64))


def group_ranks(stack: IntArray, mesh_shape: tuple[int, ...], dims: tuple[int, ...]) -> IntArray:
    """(groups, holders): the ranks that share coordinates along the sharded mesh dimensions `dims`."""
    rest = [d for d in range(len(mesh_shape)) if d not in dims]
    grid = stack.reshape(len(stack), *mesh_shape).transpose([*(1 + d for d in dims), 0, *(1 + d for d in rest)])
    return np.sort(grid.reshape(_count(mesh_shape, dims), -1), axis=1)


@dataclass(frozen=True)
class _Cuts:
    """Where the shares of the groups of a line end: before unit `unit` of tensor `tensor` (its index in the line)."""

    tensor: IntArray
    unit: IntArray
    shares: IntArray


def assign(line: Line, table: TensorTable, loads: IntArray, rows: Rows, groups: IntArray, first_group: int) -> None:
    """Shares a line out between its holders, levelling `loads` (changed in place).

    Args:
        groups: which groups of the line to turn into rows; loads are counted for all.
        first_group: number of the line's first group, for `Columns.group`; negative: none.
    """
    nbytes = _box_bytes(line, table)
    count = line.ranks.shape[1]
    if count == 1:
        loads[line.ranks[:, 0]] += nbytes.sum(axis=0)
        give(line, rows, groups, 0, 0)
        return
    cuts = _cut(line, table, nbytes, water_fill(loads[line.ranks], nbytes.sum(axis=0)))
    loads[line.ranks] += cuts.shares
    for g in groups:
        for tensor, holder, offsets, sizes in _pieces(line, table, cuts, int(g)):
            n = len(tensor)
            number = np.full(n, first_group + g if first_group >= 0 else -1, np.int64)
            rows.add(line.tensors[tensor], line.ranks[g][holder], offsets, sizes, np.zeros(n, np.int64), number)


def give(line: Line, rows: Rows, groups: IntArray, holder: int, copy: int) -> None:
    """Gives a line's boxes whole to one holder of each group."""
    if not len(groups):
        return
    offsets = np.concatenate([o[groups] for o in line.offsets])
    sizes = np.concatenate([s[groups] for s in line.sizes])
    tensor = np.repeat(line.tensors, len(groups))
    rank = np.tile(line.ranks[groups, holder], len(line.tensors))
    rows.add(tensor, rank, offsets, sizes, np.full(len(tensor), copy, np.int64), np.full(len(tensor), -1, np.int64))


def _box_bytes(line: Line, table: TensorTable) -> IntArray:
    """(T, groups) bytes of each box; equal geometries are counted once."""
    counts: dict[int, IntArray] = {}
    for s in line.sizes:
        if id(s) not in counts:
            counts[id(s)] = element_counts(s)
    itemsizes = table.itemsizes()[line.tensors]
    return np.stack([counts[id(s)] for s in line.sizes]) * itemsizes[:, None]


def unit_dim(sizes: tuple[int, ...], itemsize: int) -> int:
    """The dimension at whose indices a box may be cut: 0, or deeper where a row is huge."""
    for k in range(len(sizes)):
        if int(np.prod(sizes[k + 1 :], dtype=np.int64)) * itemsize <= MIN_CUT_BYTES:
            return k
    return max(len(sizes) - 1, 0)


def _cut(line: Line, table: TensorTable, nbytes: IntArray, shares: IntArray) -> _Cuts:
    """Rounds the ends of the shares to whole small tensors, or to units of large ones."""
    groups, holders = shares.shape
    ends = np.concatenate([np.zeros((1, groups), np.int64), np.cumsum(nbytes, axis=0)])
    wanted = np.cumsum(shares, axis=1)[:, :-1]
    tensor, unit, at = (np.zeros((groups, holders - 1), np.int64) for _ in range(3))
    for g in range(groups):
        index = np.minimum(np.searchsorted(ends[:, g], wanted[g], side="right") - 1, len(line.tensors) - 1)
        size, rest = nbytes[index, g], wanted[g] - ends[index, g]
        up = (size < MIN_CUT_BYTES) & (rest * 2 >= size)
        tensor[g] = index + up
        for j in np.flatnonzero(size >= MIN_CUT_BYTES):
            tensor[g, j], unit[g, j], into = _round_to_unit(line, table, int(index[j]), g, int(rest[j]))
            at[g, j] = ends[index[j], g] + into
        small = size < MIN_CUT_BYTES
        at[g, small] = ends[tensor[g, small], g]
    bounds = np.concatenate([np.zeros((groups, 1), np.int64), at, ends[-1][:, None]], axis=1)
    return _Cuts(tensor, unit, np.diff(bounds, axis=1))


def _round_to_unit(line: Line, table: TensorTable, index: int, g: int, rest: int) -> tuple[int, int, int]:
    """The cut nearest to `rest` bytes into a large box: tensor, unit, bytes into the box."""
    number = int(line.tensors[index])
    sizes = tuple(line.sizes[index][g].tolist())[: len(table.shapes[number])]
    itemsize = table.dtype(number).itemsize
    dim = unit_dim(sizes, itemsize)
    unit_bytes = int(np.prod(sizes[dim + 1 :], dtype=np.int64)) * itemsize
    units = int(np.prod(sizes[: dim + 1], dtype=np.int64))
    unit = (rest + unit_bytes // 2) // unit_bytes
    return (index + 1, 0, units * unit_bytes) if unit >= units else (index, unit, unit * unit_bytes)


def _pieces(
    line: Line, table: TensorTable, cuts: _Cuts, g: int
) -> Iterator[tuple[IntArray, IntArray, IntArray, IntArray]]:
    """The pieces of one group: index of the tensor in the line, holder, offsets, sizes."""
    tensors = np.arange(len(line.tensors))
    # Boundaries as even numbers between tensors and odd ones inside: 2t is before t, 2t + 1 inside it.
    position = 2 * cuts.tensor[g] + (cuts.unit[g] > 0)
    owner = np.searchsorted(position, 2 * tensors, side="right")
    inside = np.unique(cuts.tensor[g][cuts.unit[g] > 0])
    whole = np.setdiff1d(tensors, inside)
    if len(whole):
        offsets = np.stack([line.offsets[t][g] for t in whole])
        yield whole, owner[whole], offsets, np.stack([line.sizes[t][g] for t in whole])
    for t in inside.tolist():
        number = int(line.tensors[t])
        d = len(table.shapes[number])
        base, sizes = line.offsets[t][g][:d], tuple(line.sizes[t][g][:d].tolist())
        dim = unit_dim(sizes, table.dtype(number).itemsize)
        units = int(np.prod(sizes[: dim + 1], dtype=np.int64))
        at = [0, *cuts.unit[g][(cuts.tensor[g] == t) & (cuts.unit[g] > 0)].tolist(), units]
        for j in range(len(at) - 1):
            boxes = split_units(sizes, dim, at[j], at[j + 1])
            if boxes:
                offsets = np.array([b[0] for b in boxes], np.int64) + base
                n = len(boxes)
                yield np.full(n, t), np.full(n, owner[t] + j), offsets, np.array([b[1] for b in boxes], np.int64)
