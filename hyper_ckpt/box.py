"""Arithmetic on N-d boxes, vectorised.

Many boxes are two int64 arrays `offsets` and `sizes` of shape (n, D). Tensors with fewer than D
dimensions are padded on the right with offset 0 and size 1, so that element counts and
intersections need no special case; a 0-dim tensor is all padding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def plain_ints(values: Iterable[Any]) -> tuple[int, ...]:
    """Integers of any type, numpy's too, as Python's.

    Raises:
        TypeError: one is no integer.
    """
    return tuple(map(operator.index, values))


def ints_if_all(values: Any) -> Any:
    """As `plain_ints`; what has anything else comes back as it is, for whoever uses it to refuse by name."""
    try:
        return plain_ints(values)
    except TypeError:
        return values


def element_counts(sizes: IntArray) -> IntArray:
    """Elements in each box. `sizes`: (n, D). Returns (n,)."""
    return np.asarray(np.prod(sizes, axis=1, dtype=np.int64))


def pad(boxes: IntArray, width: int, fill: int) -> IntArray:
    """Widens (n, d) to (n, width) with `fill`."""
    n, d = boxes.shape
    if d == width:
        return boxes
    out = np.full((n, width), fill, np.int64)
    out[:, :d] = boxes
    return out


def intersect(
    offsets_a: IntArray, sizes_a: IntArray, offsets_b: IntArray, sizes_b: IntArray
) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_]]:
    """Intersects boxes pairwise (broadcasting). Returns offsets, sizes and a mask of the non-empty."""
    low = np.maximum(offsets_a, offsets_b)
    high = np.minimum(offsets_a + sizes_a, offsets_b + sizes_b)
    sizes = np.maximum(high - low, 0)
    return low, sizes, np.asarray((sizes > 0).all(axis=-1))


def uncovered(tensor: IntArray, offsets: IntArray, sizes: IntArray, shapes: IntArray) -> IntArray:
    """Indices of the tensors whose boxes do not cover them exactly once.

    The indicator function of a box is the alternating sum over its 2^D corners of orthant indicators, so
    boxes tile the whole box exactly if their signed corners cancel against the whole's, in any
    dimension, without a sweep.

    Args:
        tensor: (n,) index into `shapes` of each box.
        offsets: (n, D).
        sizes: (n, D); empty boxes are ignored.
        shapes: (m, D) padded shapes.
    """
    keep = (sizes > 0).all(axis=1)
    whole = np.flatnonzero((shapes > 0).all(axis=1))
    owner = np.concatenate([tensor[keep], whole]).astype(np.int64)
    low = np.concatenate([offsets[keep], np.zeros((len(whole), shapes.shape[1]), np.int64)])
    high = low + np.concatenate([sizes[keep], shapes[whole]])
    sign = np.concatenate([np.ones(int(keep.sum()), np.int64), np.full(len(whole), -1, np.int64)])
    # A padded or whole dimension contributes the same two corners to every box: skip it.
    split = [d for d in range(shapes.shape[1]) if (low[:, d] != 0).any() or (high[:, d] != shapes[owner, d]).any()]
    outside = ((low < 0) | (high > shapes[owner])).any(axis=1)
    corners = owner[:, None]
    for d in split:
        corners = np.concatenate([np.column_stack([corners, low[:, d]]), np.column_stack([corners, high[:, d]])])
        sign = np.concatenate([sign, -sign])
        low, high = np.concatenate([low, low]), np.concatenate([high, high])
    order, starts = group_equal(corners)
    sums = np.add.reduceat(sign[order], starts) if len(starts) else np.zeros(0, np.int64)
    bad = corners[order[starts[sums != 0]], 0] if len(starts) else np.zeros(0, np.int64)
    return np.asarray(np.unique(np.concatenate([bad, owner[outside]])))


def group_equal(rows: IntArray) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Groups equal rows of an (n, k) integer array.

    Returns:
        The order that sorts equal rows together (stable), and where each group starts in it.
    """
    if not len(rows):
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    low = rows.min(axis=0)
    # As Python's integers: the span of a column may have more bits than its numbers.
    spans = [high - least + 1 for high, least in zip(rows.max(axis=0).tolist(), low.tolist(), strict=True)]
    bits = sum(max(s - 1, 1).bit_length() for s in spans)
    if bits <= 62:
        key = np.zeros(len(rows), np.int64)
        for column in range(rows.shape[1]):
            key = key * spans[column] + (rows[:, column] - low[column])
        order = np.argsort(key, kind="stable")
        changed = np.diff(key[order]) != 0
    else:
        order = np.lexsort(rows.T[::-1])
        changed = (np.diff(rows[order], axis=0) != 0).any(axis=1)
    return order, np.concatenate([[0], np.flatnonzero(changed) + 1]).astype(np.intp)


def cut(view: npt.NDArray[Any], offsets: Sequence[int], sizes: Sequence[int]) -> npt.NDArray[Any]:
    """The sub-box of an array, as a view. (Indexing a 0-dim array with `()` would give a copy: hence the ellipsis.)"""
    index: list[Any] = [slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)]
    index.append(...)
    part: npt.NDArray[Any] = view[tuple(index)]
    return part


def offsets_inside(
    offsets: Sequence[int], sizes: Sequence[int], outer_offsets: Sequence[int], outer_sizes: Sequence[int]
) -> tuple[int, ...] | None:
    """Where a box begins inside another one, None if it is not whole in there."""
    low = tuple([o - s for o, s in zip(offsets, outer_offsets, strict=True)])
    for a, n, m in zip(low, sizes, outer_sizes, strict=True):
        if a < 0 or a + n > m:
            return None
    return low


def contiguous_dim(outer: tuple[int, ...], inner: tuple[int, ...]) -> int:
    """The first dimension from which a sub-box of sizes `inner` is one run inside a box of sizes `outer`.

    Dimensions below the returned one are walked; from it on, the elements are adjacent in row-major
    order. 0 means that the whole sub-box is one run.
    """
    k = len(outer)
    while k and inner[k - 1] == outer[k - 1]:
        k -= 1
    k = max(k - 1, 0)
    while k and inner[k - 1] == 1:
        k -= 1
    return k


def split_units(
    sizes: tuple[int, ...], dim: int, start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts the units [start, stop) out of a box as few sub-boxes as possible, in row-major order.

    A unit is one index into the flattened dimensions 0..dim, i.e. a sub-box with size 1 in these
    and whole in the rest.

    Returns:
        A list of (offsets, sizes) relative to the box; at most 2 * dim + 1 of them.
    """
    if start >= stop:
        return []
    if dim == 0:
        return [((start, *([0] * (len(sizes) - 1))), (stop - start, *sizes[1:]))]
    per_row = int(np.prod(sizes[1 : dim + 1], dtype=np.int64))
    first, last = -(-start // per_row), stop // per_row

    def inside(row: int, low: int, high: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        parts = split_units(sizes[1:], dim - 1, low, high)
        return [((row, *offset), (1, *size)) for offset, size in parts]

    if first > last:
        return inside(last, start - last * per_row, stop - last * per_row)
    out = inside(first - 1, start - (first - 1) * per_row, per_row) if start < first * per_row else []
    out += split_units(sizes, 0, first, last)
    return out + inside(last, 0, stop - last * per_row)
