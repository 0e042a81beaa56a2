"""Arithmetic on boxes and layouts, against the obvious way to do it."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hyper_ckpt.box import contiguous_dim, cut, group_equal, intersect, split_units, uncovered
from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt.layout import Mesh, MeshLayout, Placement, Replicate, Shard, expand
from hyper_ckpt.planning.balance import water_fill
from hyper_ckpt.planning.share import MIN_CUT_BYTES, unit_dim

small_shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[tuple[int, ...], tuple[int, ...]]]:
    ends = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape))
    return ends.map(lambda rows: (tuple(a for a, _ in rows), tuple(b - a for a, b in rows)))


def covered_once(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    count = np.zeros(shape, np.int64)
    for box in boxes:
        cut(count, *box)[...] += 1
    return bool((count == 1).all())


def bad(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    d = len(shape)
    offsets = np.array([b[0] for b in boxes], np.int64).reshape(-1, d)
    sizes = np.array([b[1] for b in boxes], np.int64).reshape(-1, d)
    return bool(len(uncovered(np.zeros(len(boxes), np.int64), offsets, sizes, np.array([shape], np.int64))))


@given(st.data(), small_shapes)
def test_uncovered_is_right_for_any_boxes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    assert bad(boxes, shape) == (not covered_once(shape, boxes))


@given(st.data(), small_shapes, st.lists(st.integers(0, 5), max_size=8))
def test_uncovered_accepts_every_tiling(data: st.DataObject, shape: tuple[int, ...], where: list[int]) -> None:
    boxes = [((0,) * len(shape), shape)]
    for number in where:
        offsets, sizes = boxes.pop(number % len(boxes))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, sizes[dim]))
        boxes.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes.append((moved, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    assert not bad(boxes, shape)
    full = [box for box in boxes if 0 not in box[1]]
    if full:
        assert bad([*boxes, full[0]], shape)
        assert bad([box for box in boxes if box is not full[0]], shape)


@pytest.mark.parametrize(
    ("boxes", "what"),
    [
        ([((0, 0), (2, 2)), ((2, 2), (2, 2))], "a diagonal hole"),
        ([((0, 0), (2, 2)), ((2, 2), (2, 2)), ((0, 2), (2, 2)), ((0, 2), (2, 2))], "an overlap as large as the hole"),
        ([((0, 0), (4, 4)), ((0, 0), (4, 4))], "twice"),
        ([((0, 0), (4, 3)), ((0, 3), (4, 2))], "outside"),
        ([((-1, 0), (5, 4))], "below zero"),
        ([], "nothing"),
    ],
)
def test_holes_and_overlaps(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], what: str) -> None:
    assert bad(boxes, (4, 4)), what


@pytest.mark.parametrize("scale", [1, 1 << 30])
def test_uncovered_names_the_tensors_whatever_the_size_of_its_keys(scale: int) -> None:
    shapes = np.array([(4, 4, 4), (0, 4, 4), (2, 2, 2), (4, 4, 4)], np.int64) * scale
    boxes = [
        (0, (0, 0, 0), (4, 4, 1)), (0, (0, 0, 1), (4, 4, 3)),
        (2, (0, 0, 0), (2, 1, 2)), (2, (0, 1, 1), (2, 1, 1)),
        (3, (0, 0, 0), (1, 4, 4)), (3, (1, 0, 0), (3, 4, 4)), (3, (1, 0, 0), (0, 4, 4)),
    ]  # fmt: skip
    tensor = np.array([b[0] for b in boxes])
    offsets, sizes = (np.array([b[i] for b in boxes], np.int64) * scale for i in (1, 2))
    assert uncovered(tensor, offsets, sizes, shapes).tolist() == [2]


def test_uncovered_of_no_tensors() -> None:
    none = np.zeros((0, 2), np.int64)
    assert uncovered(np.zeros(0, np.int64), none, none, none).tolist() == []
    assert uncovered(np.zeros(0, np.int64), none, none, np.array([(0, 3), (1, 1)])).tolist() == [1]


@given(st.lists(st.tuples(st.integers(-(2**62), 2**62), st.integers(0, 3)), max_size=9))
@example([(0, 1), (2**62, 0), (-(2**62), 0)])
def test_equal_rows_are_grouped(rows: list[tuple[int, int]]) -> None:
    array = np.array(rows, np.int64).reshape(-1, 2)
    order, starts = group_equal(array)
    groups = [sorted(part.tolist()) for part in np.split(order, starts[1:])] if rows else []
    expected: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(rows):
        expected.setdefault(row, []).append(i)
    assert sorted(groups) == sorted(expected.values())


@given(st.data(), small_shapes)
def test_intersections(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    count = np.zeros(shape, np.int64)
    cut(count, *one)[...] += 1
    cut(count, *other)[...] += 1
    low, sizes, hit = intersect(*(np.array(v, np.int64) for v in (*one, *other)))
    assert hit == (count == 2).any()
    if hit:
        assert (cut(count, low.tolist(), sizes.tolist()) == 2).all()
        assert np.prod(sizes) == (count == 2).sum()


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
def test_contiguous_dim_is_where_one_run_begins(data: st.DataObject, outer: tuple[int, ...]) -> None:
    offsets, inner = data.draw(boxes_in(outer).filter(lambda box: 0 not in box[1]))
    at = cut(np.arange(int(np.prod(outer))).reshape(outer), offsets, inner)

    def is_run(k: int) -> bool:
        parts = at.reshape(int(np.prod(inner[:k])), -1)
        return bool((np.diff(parts, axis=1) == 1).all())

    found = contiguous_dim(outer, inner)
    assert is_run(found)
    assert found == 0 or not is_run(found - 1)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), st.data())
def test_units_are_split_into_few_boxes(sizes: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(sizes) - 1))
    units = int(np.prod(sizes[: dim + 1]))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, units), st.integers(0, units))))
    boxes = split_units(sizes, dim, start, stop)
    assert len(boxes) <= 2 * dim + 1
    numbers = np.arange(int(np.prod(sizes))).reshape(sizes)
    elements = [cut(numbers, *box).reshape(-1) for box in boxes]
    per_unit = int(np.prod(sizes[dim + 1 :]))
    # In order, each of them one run.
    assert np.concatenate([*elements, []]).tolist() == list(range(start * per_unit, stop * per_unit))
    assert all(e.size for e in elements)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), 0),
        ((5,), 0),
        ((10, 1 << 18), 0),
        ((10, (1 << 18) + 1), 1),
        ((4, 4, 1 << 20), 2),
        ((4, 3, 1 << 18), 1),
        ((1, 1, 1 << 25), 2),
    ],
)
def test_huge_rows_are_cut_deeper(sizes: tuple[int, ...], expected: int) -> None:
    assert MIN_CUT_BYTES == 1 << 20
    assert unit_dim(sizes, 4) == expected


def levelled(loads: list[int], amount: int) -> list[int]:
    """One byte after the other, to whoever has least."""
    shares = [0] * len(loads)
    for _ in range(amount):
        shares[min(range(len(loads)), key=lambda i: loads[i] + shares[i])] += 1
    return shares


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(
            st.tuples(st.lists(st.integers(0, 40), min_size=n, max_size=n), st.integers(0, 60)), min_size=1, max_size=4
        )
    )
)
def test_water_fill_levels(rows: list[tuple[list[int], int]]) -> None:
    loads, amounts = np.array([r[0] for r in rows], np.int64), np.array([r[1] for r in rows], np.int64)
    shares = water_fill(loads, amounts)
    assert (shares >= 0).all()
    assert (shares.sum(axis=1) == amounts).all()
    for load, amount, found in zip(loads.tolist(), amounts.tolist(), shares.tolist(), strict=True):
        # Exact up to the rounding of each end.
        assert all(abs(a - b) <= 1 for a, b in zip(found, levelled(load, amount), strict=True))


def test_water_fill_of_large_numbers_and_equal_loads() -> None:
    huge = 10**15
    shares = water_fill(np.array([[huge, 0, huge // 2]]), np.array([2 * huge]))
    assert shares.sum() == 2 * huge
    assert np.ptp(shares[0] + [huge, 0, huge // 2]) <= 1
    assert water_fill(np.zeros((1, 4), np.int64), np.array([10])).tolist() in ([[2, 3, 3, 2]], [[2, 3, 2, 3]])
    assert water_fill(np.array([[5, 5]]), np.array([0])).tolist() == [[0, 0]]
    assert water_fill(np.array([[7]]), np.array([3])).tolist() == [[3]]


def torch_chunks(length: int, parts: int) -> list[tuple[int, int]]:
    """`torch.chunk(range(length), parts)`, empty ones added."""
    step = -(-length // parts)
    out = [(at, min(step, length - at)) for at in range(0, length, step)] if step else []
    return out + [(length, 0)] * (parts - len(out))


@given(st.integers(0, 30), st.integers(1, 9))
def test_the_rule_of_torch_chunk(length: int, parts: int) -> None:
    offsets, sizes = expand((length, 2), (parts,), (Shard(0),))
    found = [(o, s) if s else (length, 0) for o, s in zip(offsets[:, 0].tolist(), sizes[:, 0].tolist(), strict=True)]
    assert found == torch_chunks(length, parts)
    assert sizes[:, 1].tolist() == [2] * parts


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_nested_shards_cut_what_the_earlier_one_left(length: int, a: int, b: int, reverse: bool) -> None:
    order = (1, 0) if reverse else (0, 1)
    offsets, sizes = expand((length,), (a, b), (Shard(0), Shard(0)), order)
    for i, (x, y) in enumerate(product(range(a), range(b))):
        outer, inner = ((b, y), (a, x)) if reverse else ((a, x), (b, y))
        start, room = torch_chunks(length, outer[0])[outer[1]]
        at, size = torch_chunks(room, inner[0])[inner[1]]
        assert sizes[i, 0] == size
        assert not size or offsets[i, 0] == start + at
    assert not bad([((int(o),), (int(s),)) for o, s in zip(offsets[:, 0], sizes[:, 0], strict=True)], (length,))


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((4,), (Shard(1), Replicate())),
        ((), (Shard(0), Replicate())),
        ((4,), (Shard(-1), Replicate())),
        ((4,), (Shard(0, (1, 2)), Replicate())),
        ((4,), (Shard(0, (1, 2, 1)), Replicate())),
        ((4,), (Shard(0, (5, -1)), Replicate())),
        ((5,), (Shard(0), Shard(0, (1, 2)))),
    ],
)
def test_placements_that_do_not_fit(shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    with pytest.raises(UnsupportedLayoutError, match=r"fit|sum"):
        expand(shape, (2, 2), placements)


def test_meshes_and_layouts_that_cannot_be() -> None:
    for shape, ranks in [((2,), (0,)), ((2,), (0, 0)), ((2, 2), (0, 1, 2))]:
        with pytest.raises(UnsupportedLayoutError, match="distinct ranks"):
            Mesh(shape, ranks)
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    for placements, order in [((Replicate(),), ()), ((Replicate(), Replicate()), (0, 0)), ((), ())]:
        with pytest.raises(UnsupportedLayoutError, match="permutation"):
            MeshLayout(mesh, placements, order)
