"""Planners that list what a load reads: parts of targets, who shares what, and what they refuse on all ranks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_ckpt
from hyper_ckpt import ItemLoadPlanner, LoadPlan, MetadataIndex, ReadItem
from hyper_ckpt.contracts.planner import PlanContext
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import CheckpointError, PlanError
from hyper_ckpt.layout import Replicated
from hyper_ckpt.metadata import TensorStorageMetadata
from hyper_ckpt.options import LoadOptions
from hyper_ckpt.receipt import BLOCK_BYTES
from hyper_ckpt.testing.meshed import MeshedStager, distribute, meshed_platform
from hyper_ckpt.testing.world import run_world
from hyper_ckpt.values import ShardedTensor

from .test_limits import least
from .worlds import by_rows, check_filled, filled, fresh, load_on, poisoned, save_on

Stored = Mapping[str, TensorStorageMetadata]


class SomeRows(ItemLoadPlanner):
    """Fills rows `low` to `high` of one tensor, and everything else whole."""

    def __init__(self, name: str, low: int, high: int, sharers: tuple[int, ...] = ()) -> None:
        self._name, self._low, self._high, self._sharers = name, low, high, sharers

    def identity(self) -> str:
        return f"SomeRows({self._name!r}, {self._low}, {self._high})"

    def create_local_plan(self, tensors: Mapping[str, Any], stored: Stored, context: PlanContext) -> LoadPlan:
        assert set(stored) >= set(tensors)
        out = []
        for each in super().create_local_plan(tensors, stored, context).items:
            offset, sizes = each.index.offset, each.sizes
            assert offset is not None
            assert len(stored[each.index.fqn].size) == len(sizes)
            if each.index.fqn == self._name:
                low, high = max(offset[0], self._low), min(offset[0] + sizes[0], self._high)
                offset, sizes = (low, *offset[1:]), (max(high - low, 0), *sizes[1:])
                if high <= low:
                    continue
            out.append(self._item(MetadataIndex(each.index.fqn, offset), sizes))
        return LoadPlan(out)

    def _item(self, index: MetadataIndex, sizes: tuple[int, ...]) -> ReadItem:
        return ReadItem(index, sizes, self._sharers[0] if self._sharers else None, self._sharers)


W, V = filled((40, 6), "float32", 1), filled((9, 4), "int16", 2)
OLD = filled((40, 6), "float32", 3)


def saved() -> str:
    url = fresh()
    save_on(2, lambda r: {"w": distribute(W, by_rows(2), r), "v": V}, url)
    return url


def expect_rows(states: list[dict[str, Any]], low: int, high: int) -> None:
    expected = OLD.copy()
    expected[low:high] = W[low:high]
    for rank, state in enumerate(states):
        own = distribute(expected, state["w"].layout, rank)
        assert state["w"].local.tobytes() == own.local.tobytes(), rank
        assert state["v"].local.tobytes() == V.tobytes()


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("rows", [(0, 40), (3, 17), (15, 16), (0, 0), (20, 40)])
def test_partial_fills_leave_the_rest(on_device: bool, share_reads: bool, rows: tuple[int, int]) -> None:
    def target(rank: int) -> dict[str, Any]:
        blank = poisoned(V.shape, "int16")
        return {
            "w": distribute(OLD, by_rows(3), rank, on_device=on_device),
            "v": distribute(blank, Replicated(), rank, on_device=on_device),
        }

    states, _ = load_on(3, target, saved(), planner=SomeRows("w", *rows), share_reads=share_reads)
    expect_rows(states, *rows)


def test_only_partial_fills_copy_out() -> None:
    """A shard that is filled whole is not copied out of the device first."""
    url = saved()

    def job(platform: Platform) -> tuple[int, int]:
        state = {"w": distribute(OLD, Replicated(), 0, on_device=True)}
        state["v"] = distribute(V, Replicated(), 0, on_device=True)
        assert isinstance(platform.stager, MeshedStager)
        hyper_ckpt.load(state, url, planner=SomeRows("w", 2, 5), platform=platform)
        return platform.stager.copies_out, platform.stager.copies_in

    assert run_world(1, job, platform=meshed_platform) == [(1, 2)]


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("batch", [1, 64, 1 << 20])
def test_items_are_read_once_and_broadcast(on_device: bool, batch: int) -> None:
    def target(rank: int) -> dict[str, Any]:
        blank = poisoned(V.shape, "int16")
        return {
            "w": distribute(OLD, Replicated(), rank, on_device=on_device),
            "v": distribute(blank, Replicated(), rank, on_device=on_device),
        }

    states, reports = load_on(
        3,
        target,
        saved(),
        planner=SomeRows("w", 3, 31, (0, 1, 2)),
        options=LoadOptions(broadcast_batch_bytes=batch),
    )
    expect_rows(states, 3, 31)
    total = 28 * 6 * 4 + V.nbytes
    assert [r.bytes_read for r in reports] == [total, 0, 0]
    assert [r.bytes_received for r in reports] == [0, total, total]
    for alone in ({"share_reads": False}, {"use_collectives": False}):
        states, reports = load_on(3, target, saved(), planner=SomeRows("w", 3, 31, (0, 1, 2)), **alone)
        expect_rows(states, 3, 31)
        assert [r.bytes_read for r in reports] == [total] * 3


class Mixed(ItemLoadPlanner):
    """Row by row in turn: read by the rank for itself, or shared by a group that it is in."""

    def __init__(self, *groups: tuple[int, ...]) -> None:
        self._groups = groups

    def create_local_plan(self, tensors: Mapping[str, Any], stored: Stored, context: PlanContext) -> LoadPlan:
        items = []
        for name in tensors:
            for row in range(stored[name].size[0]):
                index, sizes = MetadataIndex(name, (row, 0)), (1, stored[name].size[1])
                turn = row % (len(self._groups) + 1)
                group = self._groups[turn - 1] if turn else ()
                if context.rank in group:
                    items.append(ReadItem(index, sizes, group[row % len(group)], group))
                else:
                    items.append(ReadItem(index, sizes))
        return LoadPlan(items)


@pytest.mark.parametrize("batch", [1, 30_000, 1 << 20])
@pytest.mark.parametrize("groups", [((0, 1, 2),), ((0, 1), (0, 1, 2)), ((1, 2), (0, 2))])
def test_shards_that_are_filled_bit_by_bit_in_little_memory(batch: int, groups: tuple[tuple[int, ...], ...]) -> None:
    """Buffers of shards that wait for a later batch never add up to more than what was asked for."""
    whole = {f"t{i:02}": filled((6, 4000 + i), "float64", i) for i in range(30)}
    url = fresh()
    save_on(2, lambda r: dict(whole), url)

    def load(limit: int) -> None:
        def target(rank: int) -> dict[str, Any]:
            blank = {n: poisoned(a.shape, a.dtype.name) for n, a in whole.items()}
            return {n: distribute(a, Replicated(), rank, on_device=True) for n, a in blank.items()}

        options = LoadOptions(broadcast_batch_bytes=batch)
        states, reports = load_on(3, target, url, planner=Mixed(*groups), options=options, max_host_bytes=limit)
        check_filled(states, whole)
        assert max(r.peak_host_bytes for r in reports) <= limit

    total = sum(a.nbytes for a in whole.values())
    limit = least(load)
    if len(groups) == 1:
        assert limit < total // 2 + 3 * BLOCK_BYTES + 2 * batch


class Sharing(ItemLoadPlanner):
    """Each rank lists what `of_rank` says."""

    def __init__(self, of_rank: Callable[[int], list[ReadItem]]) -> None:
        self._of_rank = of_rank

    def create_local_plan(self, tensors: Mapping[str, Any], stored: Stored, context: PlanContext) -> LoadPlan:
        return LoadPlan(self._of_rank(context.rank))


def shared(low: int, reader: int | None, sharers: tuple[int, ...]) -> ReadItem:
    return ReadItem(MetadataIndex("w", (low, 0)), (4, 6), reader, sharers)


EVERYONE = (0, 1, 2)
MISMATCHES: dict[str, tuple[Callable[[int], list[ReadItem]], str]] = {
    "one does not list it": (
        lambda r: [shared(0, 1, EVERYONE)] if r != 1 else [],
        r"'w' at \(0, 0\) of sizes \(4, 6\) is to be read by rank 1 for ranks \[0, 1, 2\], but ranks \[1\] do not",
    ),
    "another box": (lambda r: [shared(4 * (r == 2), 0, EVERYONE)], r"for ranks \[0, 1, 2\], but ranks \[0, 1\] do not"),
    "another reader": (lambda r: [shared(0, r, EVERYONE)], "with the same reader"),
    "other sharers": (lambda r: [shared(0, 0, (0, 1) if r == 0 else EVERYONE)][: 2 - r], "do not list it"),
    "a reader outside": (lambda r: [shared(0, 2, (0, 1))][: 2 - r], r"must include its reader \(2\) and rank 0"),
    "no reader": (lambda r: [shared(0, None, EVERYONE)], r"must include its reader \(None\)"),
    "no sharers": (lambda r: [shared(0, 0, ())], r"must include its reader \(0\) and rank [12]"),
    "a lister outside": (lambda r: [shared(0, 0, (0, 1))], "and rank 2, which lists it"),
    "not sorted": (lambda r: [shared(0, 0, (2, 1, 0))], "are not sorted ranks of 3"),
    "twice": (lambda r: [shared(0, 0, (0, 0, 1, 2))], "are not sorted ranks of 3"),
    "ranks that are not there": (lambda r: [shared(0, 0, (0, 1, 2, 7))], "are not sorted ranks of 3"),
    "no such row": (lambda r: [shared(38, 0, EVERYONE)], "lies in no local shard"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_sharers_that_do_not_agree_fail_on_all_ranks(case: str) -> None:
    of_rank, text = MISMATCHES[case]
    url = saved()

    def job(platform: Platform) -> None:
        target = distribute(OLD, Replicated(), platform.ranks.rank)
        with pytest.raises(CheckpointError, match=text):
            hyper_ckpt.load({"w": target}, url, planner=Sharing(of_rank), platform=platform, timeout=20)
        assert target.local.tobytes() == OLD.tobytes()
        hyper_ckpt.load({"w": target}, url, planner=ItemLoadPlanner(), platform=platform, timeout=20)
        assert target.local.tobytes() == W.tobytes()

    run_world(3, job, platform=meshed_platform)


@settings(max_examples=25)
@given(st.data())
def test_any_agreed_sharing_fills_what_it_lists(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    listed: list[list[ReadItem]] = [[] for _ in range(size)]
    expected = [OLD.copy() for _ in range(size)]
    for low in data.draw(st.lists(st.integers(0, 36), max_size=8, unique=True)):
        group = tuple(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
        each = shared(low, data.draw(st.sampled_from(group)), group)
        for rank in group:
            listed[rank].append(each)
            expected[rank][low : low + 4] = W[low : low + 4]
    on_device = data.draw(st.booleans())
    states, _ = load_on(
        size,
        lambda r: {"w": distribute(OLD, Replicated(), r, on_device=on_device)},
        saved(),
        planner=Sharing(listed.__getitem__),
        options=LoadOptions(broadcast_batch_bytes=data.draw(st.sampled_from([1, 200, 1 << 20]))),
    )
    for state, wanted in zip(states, expected, strict=True):
        assert state["w"].local.tobytes() == wanted.tobytes()


def test_a_target_without_memory_is_filled_whole_or_not_at_all() -> None:
    from hyper_ckpt.testing.meshed import Meshed

    def target(rank: int) -> dict[str, Any]:
        return {"w": Meshed(None, W.shape, by_rows(2), rank, "float32")}

    url = saved()
    with pytest.raises(PlanError, match="'w' has no memory of its own yet"):
        load_on(2, target, url, planner=SomeRows("w", 1, 30))
    states, _ = load_on(2, target, url, planner=ItemLoadPlanner())
    assert b"".join(s["w"].local.tobytes() for s in states) == W.tobytes()


def test_the_slice_of_a_grown_vocabulary_needs_no_planner() -> None:
    grown = np.concatenate([OLD, OLD])
    load_on(1, lambda r: {"w": ShardedTensor([(grown[:40], (0, 0))], (40, 6))}, saved())
    assert grown[:40].tobytes() == W.tobytes()
    assert grown[40:].tobytes() == OLD.tobytes()


class NothingOf(ItemLoadPlanner):
    """Leaves a tensor out, or all but its first row."""

    def __init__(self, name: str, rows: int) -> None:
        self._name, self._rows = name, rows

    def identity(self) -> str:
        return f"NothingOf({self._name}, {self._rows})"

    def create_local_plan(self, tensors: Any, metadata: Any, context: Any) -> LoadPlan:
        items = []
        for item in super().create_local_plan(tensors, metadata, context).items:
            if item.index.fqn != self._name:
                items.append(item)
            elif self._rows:
                items.append(dataclasses.replace(item, sizes=(self._rows, *item.sizes[1:])))
        return LoadPlan(tuple(items))


@pytest.mark.parametrize("rows", [0, 1])
def test_what_a_planner_leaves_out_is_not_called_loaded(rows: int) -> None:
    url = fresh()
    hyper_ckpt.save({"v": np.ones((3, 2)), "w": np.ones((3, 2))}, url, no_dist=True)
    target = {"v": np.zeros((3, 2)), "w": np.zeros((3, 2))}
    report = hyper_ckpt.load(target, url, no_dist=True, planner=NothingOf("w", rows), strict="exact")
    assert (report.loaded, report.unfilled) == (("v",), ("w",))
    assert target["w"].sum() == 2 * rows
