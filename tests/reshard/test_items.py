"""Planners that list items: what they write and read, and what they refuse on all ranks."""

import contextlib
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
from hyper_ckpt.layout import Replicated
from hyper_ckpt.metadata import TensorStorageMetadata
from hyper_ckpt.options import SaveOptions
from hyper_ckpt.testing.meshed import distribute, meshed_platform
from hyper_ckpt.testing.world import run_world

from .strategies import jobs, wholes
from .worlds import by_rows, check_filled, check_stored_once, filled, fresh, load_on, manifest_of, poisoned, save_on

Stored = Mapping[str, TensorStorageMetadata]


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

    with pytest.warns(UserWarning, match="different tensors under 'w'"):
        save_on(3, state, url, planner=Cut(), options=SaveOptions(conflicts="warn"))
    assert set(writers(url, "w")) == {0}
    check_stored_once(url, {"w": filled((8, 4), seed=0)})
    with pytest.raises(CheckpointError, match="different tensors under 'w'"):
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
