"""Save planning: which rank writes which box."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hyper_ckpt.box import IntArray, group_equal, pad, uncovered
from hyper_ckpt.columns import Columns, TensorTable
from hyper_ckpt.description import EXPLICIT, REPLICATED, World
from hyper_ckpt.errors import PlanError
from hyper_ckpt.layout import expand
from hyper_ckpt.planning.share import Line, Rows, assign, build_lines, give, holders_by_name, table_of


@dataclass(frozen=True)
class SavePolicy:
    """How replicas are stored.

    Args:
        remove_redundancy: store each box once; False: every holder stores its copy, if all copies are equal.
        save_to_minimum_rank: the lowest holder stores a box whole, instead of sharing it out.
    """

    remove_redundancy: bool = True
    save_to_minimum_rank: bool = False


def plan_loose(world: World, policy: SavePolicy) -> Columns:
    """Chunks of the tensors whose boxes are listed one by one. Only rank 0 knows them all."""
    table = table_of(world)
    _, loose = build_lines(world, table)
    rows = Rows(table.width)
    loads = np.zeros(world.world_size, np.int64)
    for line in _loose_lines(world, table, loose):
        _place_line(line, world, table, policy, loads, rows, None)
    return rows.columns(table)


def plan_lines(world: World, policy: SavePolicy, rank: int | None = None) -> Columns:
    """Chunks of all other tensors; with `rank`, only those it writes. The same on every rank."""
    table = table_of(world)
    rows = Rows(table.width)
    loads = np.zeros(world.world_size, np.int64) if world.base_load is None else world.base_load.copy()
    for line in build_lines(world, table)[0]:
        _place_line(line, world, table, policy, loads, rows, rank)
    columns = rows.columns(table)
    return columns if rank is None else columns.take(columns.rank == rank)


def join(a: Columns, b: Columns) -> Columns:
    """The chunks of both, in canonical order."""
    rows = Rows(a.table.width)
    for c in (a, b):
        rows.add(c.tensor, c.rank, c.offsets, c.sizes, c.copy, c.group)
    return rows.columns(a.table)


def check_cover(columns: Columns) -> None:
    """Proves that the first copies of every tensor cover it exactly once.

    Raises:
        PlanError: a hole or an overlap; names the tensors.
    """
    first = columns.copy == 0
    shapes = columns.table.padded_shapes()
    bad = uncovered(columns.tensor[first], columns.offsets[first], columns.sizes[first], shapes)
    if len(bad):
        names = [columns.table.names[i] for i in bad[:4]]
        raise PlanError(
            f"the boxes that ranks hold of {', '.join(map(repr, names))} ({len(bad)} tensors) do not "
            "cover them exactly once: a hole or an overlap. Nothing was written: check offsets and sizes of the shards"
        )


def _place_line(
    line: Line, world: World, table: TensorTable, policy: SavePolicy, loads: IntArray, rows: Rows, rank: int | None
) -> None:
    holders = line.ranks.shape[1]
    mine = np.arange(len(line.ranks)) if rank is None else np.flatnonzero((line.ranks == rank).any(axis=1))
    # Of replicas that differ only the lowest rank's is kept: readers of several copies would mix them. Equal ones among
    # them are not cut either: above 1 MiB only samples were compared.
    if table.names[int(line.tensors[0])] in world.conflicts:
        give(line, rows, mine, 0, 0)
    elif not policy.remove_redundancy:
        for j in range(holders):
            give(line, rows, mine, j, j)
    elif policy.save_to_minimum_rank:
        give(line, rows, mine, 0, 0)
    else:
        assign(line, table, loads, rows, mine, -1)


def _loose_lines(world: World, table: TensorTable, loose: list[int]) -> Iterator[Line]:
    """Lines of one group each: the distinct boxes of the loose tensors by the ranks that hold them."""
    tensor, rank, offsets, sizes = _loose_boxes(world, table, loose)
    order, starts = group_equal(np.column_stack([tensor, offsets, sizes]))
    by_holders: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for rows in np.split(order, starts[1:]) if len(order) else []:
        row = int(rows[0])
        conflict = table.names[int(tensor[row])] in world.conflicts
        by_holders.setdefault((tuple(sorted(set(rank[rows].tolist()))), conflict), []).append(row)
    for (holders, _), members in sorted(by_holders.items(), key=lambda kv: (len(kv[0][0]), kv[0])):
        chosen = np.array(sorted(members, key=lambda r: (tensor[r], *offsets[r])))
        boxes = [(offsets[r : r + 1], sizes[r : r + 1]) for r in chosen]
        yield Line(
            np.array([holders], np.int64), tensor[chosen], tuple(b[0] for b in boxes), tuple(b[1] for b in boxes)
        )


def _loose_boxes(world: World, table: TensorTable, loose: list[int]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Every rank's boxes of the loose tensors: tensor, rank, offsets, sizes. Empty boxes are left out."""
    number_of = {table.names[i]: i for i in loose}
    tensor, rank, offsets, sizes = [], [], [], []

    def add(number: int, ranks: IntArray, o: IntArray, s: IntArray) -> None:
        keep = (s > 0).all(axis=1)
        own = world.holders.get(table.names[number])
        if own is not None:
            keep &= np.isin(ranks, own)
        tensor.append(np.full(int(keep.sum()), number, np.int64))
        rank.append(ranks[keep])
        offsets.append(pad(o[keep], table.width, 0))
        sizes.append(pad(s[keep], table.width, 1))

    holders = holders_by_name(world) if number_of else {}
    for name, number in number_of.items():
        shape = table.shapes[number]
        for c, i in holders[name]:
            layout = world.structures[c].layouts[i]
            if layout.mesh == REPLICATED:
                ranks = np.flatnonzero(world.class_of == c)
                whole = np.tile(np.asarray(shape, np.int64).reshape(1, -1), (len(ranks), 1))
                add(number, ranks, np.zeros_like(whole), whole)
            elif layout.mesh != EXPLICIT:
                o, s = expand(shape, layout.mesh_shape, layout.decoded(), layout.order)
                for ranks in world.meshes[c][layout.mesh]:
                    add(number, ranks, o, s)
    explicit = world.boxes
    for row, name in enumerate(explicit.names):
        if name in number_of:
            o = np.array(explicit.offsets[row], np.int64).reshape(1, -1)
            s = np.array(explicit.sizes[row], np.int64).reshape(1, -1)
            add(number_of[name], explicit.rank[row : row + 1], o, s)
    if not tensor:
        empty = np.zeros((0, table.width), np.int64)
        return np.zeros(0, np.int64), np.zeros(0, np.int64), empty, empty
    return np.concatenate(tensor), np.concatenate(rank), np.concatenate(offsets), np.concatenate(sizes)
