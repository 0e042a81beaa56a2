"""Load planning: which rank reads which wanted box, and who else wants it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from hyper_ckpt.box import IntArray, split_units
from hyper_ckpt.columns import Columns, TensorTable
from hyper_ckpt.description import World
from hyper_ckpt.planning.share import Rows, assign, build_lines, give, table_of, unit_dim

OwnBoxes = list[tuple[str, tuple[int, ...], tuple[int, ...]]]


def plan_alone(table: TensorTable, rank: int, boxes: OwnBoxes) -> Columns:
    """Every wanted box is read by the rank that wants it."""
    rows = Rows(table.width)
    number_of = {name: i for i, name in enumerate(table.names)}
    _add_own(rows, number_of, rank, boxes)
    return rows.columns(table)


def plan_shared(world: World, rank: int, boxes: OwnBoxes, max_bytes: int) -> Columns:
    """Boxes that several ranks want are read in shares and passed on.

    Args:
        world: what all ranks want.
        rank: the rank whose rows to make: what it reads, and what it receives.
        boxes: all boxes that this rank wants; those of tensors that fit no line, or differ between ranks, it
            reads for itself.
        max_bytes: larger shared boxes are cut, so that they can be passed on piece by piece.
    """
    table = table_of(world)
    lines, loose = build_lines(world, table)
    rows = Rows(table.width)
    loads = np.zeros(world.world_size, np.int64)
    groups: list[tuple[int, ...]] = []
    for line in lines:
        if table.names[int(line.tensors[0])] in world.conflicts:
            continue
        mine = np.flatnonzero((line.ranks == rank).any(axis=1))
        if line.ranks.shape[1] == 1:
            give(line, rows, mine, 0, 0)
            continue
        assign(line, table, loads, rows, mine, len(groups))
        groups += map(tuple, line.ranks.tolist())
    unshared = {*[table.names[i] for i in loose], *world.conflicts}
    number_of = {name: i for i, name in enumerate(table.names) if name in unshared}
    _add_own(rows, number_of, rank, [b for b in boxes if b[0] in number_of])
    # Lines of the same ranks share one process group.
    distinct = sorted(set(groups))
    columns = rows.columns(table, tuple(distinct))
    number = {g: i for i, g in enumerate(distinct)}
    index = np.array([*(number[g] for g in groups), -1], np.int64)
    numbered = dataclasses.replace(columns, group=index[columns.group])
    return cut_large(numbered, max_bytes)


def cut_large(columns: Columns, max_bytes: int) -> Columns:
    """Cuts the shared boxes above `max_bytes` along their outer dimensions."""
    nbytes = columns.nbytes()
    large = (columns.group >= 0) & (nbytes > max_bytes)
    if not large.any():
        return columns
    kept = columns.take(~large)
    rows = Rows(columns.table.width)
    rows.add(kept.tensor, kept.rank, kept.offsets, kept.sizes, kept.copy, kept.group)
    for row in np.flatnonzero(large).tolist():
        offsets, sizes = columns.box(row)
        itemsize = columns.table.dtype(int(columns.tensor[row])).itemsize
        dim = unit_dim(sizes, itemsize)
        units = int(np.prod(sizes[: dim + 1], dtype=np.int64))
        step = max(max_bytes * units // int(nbytes[row]), 1)
        parts = [part for at in range(0, units, step) for part in split_units(sizes, dim, at, min(at + step, units))]
        n = len(parts)
        low: IntArray = np.array([p[0] for p in parts], np.int64) + np.array(offsets, np.int64)
        same = np.full(n, row)
        rows.add(
            columns.tensor[same],
            columns.rank[same],
            low,
            np.array([p[1] for p in parts], np.int64),
            columns.copy[same],
            columns.group[same],
        )
    return rows.columns(columns.table, columns.groups)


def _add_own(rows: Rows, number_of: dict[str, int], rank: int, boxes: OwnBoxes) -> None:
    n, width = len(boxes), rows.width
    offsets, sizes = np.zeros((n, width), np.int64), np.ones((n, width), np.int64)
    names, lows, lengths = zip(*boxes, strict=True) if boxes else ((), (), ())
    ndims = np.array([*map(len, lows)], np.int64)
    inside = np.arange(width) < ndims[:, None]
    offsets[inside] = np.fromiter(itertools.chain.from_iterable(lows), np.int64)
    sizes[inside] = np.fromiter(itertools.chain.from_iterable(lengths), np.int64)
    tensor = np.array([number_of[name] for name in names], np.int64)
    rows.add(tensor, np.full(n, rank, np.int64), offsets, sizes, np.zeros(n, np.int64), np.full(n, -1, np.int64))
