"""Planners that list items: what they write and read, and what they refuse on all ranks."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_ckpt
from hyper_ckpt import ItemLoadPlanner, ItemSavePlanner, LoadPlan, MetadataIndex, ReadItem, SavePlan, WriteItem
from hyper_ckpt.contracts.planner import PlanContext
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import CheckpointError, PlanError
from hyper_ckpt.layout import Mesh, MeshLayout, Replicated, Shard
from hyper_ckpt.metadata import TensorStorageMetadata
from hyper_ckpt.options import LoadOptions, SaveOptions
from hyper_ckpt.receipt import BLOCK_BYTES
from hyper_ckpt.testing.meshed import MeshedStager, distribute, meshed_platform
from hyper_ckpt.testing.world import run_world
from hyper_ckpt.values import ShardedTensor

from .strategies import jobs, wholes
from .test_limits import least
from .worlds import check_filled, check_stored_once, filled, fresh, load_on, manifest_of, poisoned, save_on

Stored = Mapping[str, TensorStorageMetadata]


def by_rows(world_size: int) -> MeshLayout:
    return MeshLayout(Mesh((world_size,), tuple(range(world_size))), (Shard(0),))


def writers(url: str, name: str) -> list[int]:
    """Who wrote each chunk of a tensor."""
    manifest = manifest_of(url)
    return [manifest.files[int(f)].rank for f in manifest.tensor(name).copies[0].file]


class Cut(ItemSavePlanner):
    """Every rank lists its boxes row by row; the shares are dealt out from the last rank on."""

    def create_local_plan(self, tensors: Mapping[str, Any], context: PlanContext) -> SavePlan:
        return SavePlan([row for item in super().create_local_plan(tensors, context).items for row in rows_of(item)])

    def create_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return super().create_global_plan(plans[::-1])[::-1]


def rows_of(item: WriteItem) -> list[WriteItem]:
    if not item.sizes or item.sizes[0] > 20:
        return [item]
    offset = item.index.offset
    assert offset is not None
    return [
        WriteItem(MetadataIndex(item.index.fqn, (offset[0] + i, *offset[1:])), (1, *item.sizes[1:]), item.dtype)
        for i in range(item.sizes[0])
    ]


@st.composite
def saves_and_loads(draw: st.DrawFn) -> Any:
    whole = draw(wholes)
    return whole, draw(jobs(whole)), draw(jobs(whole))


@settings(max_examples=40)
@given(saves_and_loads(), st.booleans())
def test_any_world_saves_and_any_other_loads(drawn: Any, share_reads: bool) -> None:
    whole, saved, loaded = drawn
    for load_planner in (None, ItemLoadPlanner()):
        url = fresh()
        save_on(saved.world, lambda rank: saved.state(whole, rank), url, planner=ItemSavePlanner())
        check_stored_once(url, whole)
        states, _ = load_on(
            loaded.world,
            lambda rank: loaded.blank(whole, rank),
            url,
            planner=load_planner,
            share_reads=share_reads,
        )
        check_filled(states, whole)


@settings(max_examples=20)
@given(saves_and_loads())
def test_items_that_are_parts_of_shards(drawn: Any) -> None:
    """Where ranks hold boxes that overlap, rows of one item and whole items of another may not fit."""
    whole, saved, loaded = drawn
    url = fresh()
    with contextlib.suppress(PlanError):
        save_on(saved.world, lambda rank: saved.state(whole, rank), url, planner=Cut())
        check_stored_once(url, whole)
        states, _ = load_on(loaded.world, lambda rank: loaded.blank(whole, rank), url)
        check_filled(states, whole)


def test_replicas_are_spread_whole() -> None:
    url = fresh()
    whole = {f"t{i}": filled((100 + i, 3), seed=i) for i in range(8)}
    save_on(4, lambda rank: dict(whole), url, planner=ItemSavePlanner())
    assert Counter(writers(url, name)[0] for name in whole) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_tied_tensors_are_stored_once() -> None:
    url, w = fresh(), filled((6, 4))

    def state(rank: int, source: np.ndarray = w) -> dict[str, Any]:
        tied = source.copy()
        return {"embedding": tied, "head": tied, "own": filled((3,))}

    save_on(2, state, url, planner=ItemSavePlanner())
    manifest = manifest_of(url)
    one, two = (manifest.tensor(n).copies[0] for n in ("embedding", "head"))
    assert (one.file.tolist(), one.start.tolist()) == (two.file.tolist(), two.start.tolist())
    for share_reads in (True, False):
        states, _ = load_on(
            2, lambda r: state(r, poisoned((6, 4))), url, planner=ItemLoadPlanner(), share_reads=share_reads
        )
        assert all(s["head"] is s["embedding"] and s["head"].tobytes() == w.tobytes() for s in states)


class OnlyHead(ItemLoadPlanner):
    def create_local_plan(self, tensors: Mapping[str, Any], stored: Stored, context: PlanContext) -> LoadPlan:
        return LoadPlan([ReadItem(MetadataIndex("head", (0, 0)), (2, 4))])


@pytest.mark.parametrize("share_reads", [True, False])
def test_an_item_of_a_tied_name_fills_the_memory(share_reads: bool) -> None:
    url, w = fresh(), filled((6, 4))
    save_on(2, lambda r: {"embedding": w, "head": w}, url)
    blank = poisoned((6, 4))

    def target(rank: int) -> dict[str, Any]:
        tied = blank.copy()
        return {"embedding": tied, "head": tied}

    states, _ = load_on(2, target, url, planner=OnlyHead(), share_reads=share_reads)
    for state in states:
        assert state["embedding"][:2].tobytes() == w[:2].tobytes()
        assert state["embedding"][2:].tobytes() == blank[2:].tobytes()


@pytest.mark.parametrize("on_device", [True, False])
def test_of_replicas_that_differ_the_lowest_is_kept(on_device: bool) -> None:
    url = fresh()

    def state(rank: int) -> dict[str, Any]:
        array = filled((8, 4), seed=rank)
        return {"w": distribute(array, Replicated(), rank, on_device=on_device)}

    with pytest.warns(UserWarning, match="different values of 'w'"):
        save_on(3, state, url, planner=Cut())
    assert set(writers(url, "w")) == {0}
    check_stored_once(url, {"w": filled((8, 4), seed=0)})
    with pytest.raises(CheckpointError, match="different values of 'w'"):
        save_on(3, state, fresh(), planner=Cut(), options=SaveOptions(conflicts="error"))


def test_equal_replicas_on_a_device_are_no_conflict() -> None:
    url, w = fresh(), filled((8, 4))
    save_on(3, lambda r: {"w": distribute(w, Replicated(), r, on_device=True)}, url, planner=Cut())
    check_stored_once(url, {"w": w})
    assert len(set(writers(url, "w"))) == 3


class Broken(ItemSavePlanner):
    """Lists or decides what is not allowed."""

    def __init__(self, local: Callable[[int], Any] | None = None, decided: Any = None) -> None:
        self._local, self._decided = local, decided

    def create_local_plan(self, tensors: Mapping[str, Any], context: PlanContext) -> SavePlan:
        plan = super().create_local_plan(tensors, context)
        return plan if self._local is None else self._local(context.rank)

    def create_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return super().create_global_plan(plans) if self._decided is None else self._decided(plans)


def item(name: str, offset: Any, sizes: Any) -> WriteItem:
    return WriteItem(MetadataIndex(name, offset), sizes, "float32")


LOCAL = {
    "no such tensor": (lambda r: SavePlan([item("v", (0,), (1,))]), r"'v' at \(0,\) .* rank \d has no tensor"),
    "another rank's box": (lambda r: SavePlan([item("w", (2 - 2 * r, 0), (2, 3))]), r"lies in no local shard: rank"),
    "dimensions": (lambda r: SavePlan([item("w", (0,), (2,))]), "lies in no local shard"),
    "unequal": (lambda r: SavePlan([item("w", (0,), (2, 3))]), "one offset and one size for each dimension"),
    "negative": (lambda r: SavePlan([item("w", (0, 0), (-2, 3))]), "is no box"),
    "no numbers": (lambda r: SavePlan([item("w", (0.5, 0), (2, 3))]), "offsets and sizes are integers"),
    "a list": (lambda r: [], "gave a list where a SavePlan is wanted"),
    "other items": (lambda r: SavePlan([1]), "listed a int"),  # type: ignore[list-item]
    "a hole": (lambda r: SavePlan([item("w", (2 * r, 0), (1, 3))]), "hole or an overlap"),
    "nothing": (lambda r: SavePlan(), "hole or an overlap"),
}
DECIDED = {
    "too few plans": (lambda plans: plans[:1], "a list of 2 plans"),
    "swapped": (lambda plans: plans[::-1], r"the item for 'w' at \(2, 0\) .* no part of what rank 0 listed"),
    "twice": (lambda plans: [SavePlan([*p.items, *p.items]) for p in plans], "hole or an overlap"),
    "not all": (lambda plans: [plans[0], SavePlan()], "hole or an overlap"),
    "grown": (lambda plans: [SavePlan([item("w", (0, 0), (4, 3))]), SavePlan()], "no part of what rank 0 listed"),
    "None": (lambda plans: [None, None], "create_global_plan gave a NoneType"),
    "an exception": (lambda plans: [][0], "list index out of range"),
}


@pytest.mark.parametrize("case", [*LOCAL, *DECIDED])
def test_bad_items_fail_on_all_ranks(case: str) -> None:
    local, text = LOCAL.get(case, (None, ""))
    decided, text = DECIDED.get(case, (None, text))
    url, w = fresh(), filled((4, 3))

    def job(platform: Platform) -> None:
        rank = platform.ranks.rank
        state = {"w": distribute(w, by_rows(2), rank)}
        planner = Broken(local, decided)
        with pytest.raises((CheckpointError, IndexError), match=text):
            hyper_ckpt.save(state, url, planner=planner, platform=platform, timeout=20)
        # Nothing was left behind, and the ranks are still in step.
        hyper_ckpt.save(state, url, planner=ItemSavePlanner(), platform=platform, timeout=20)

    run_world(2, job, platform=meshed_platform)
    check_stored_once(url, {"w": w})


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
