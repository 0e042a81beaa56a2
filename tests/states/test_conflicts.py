"""Replicas that differ are kept, each for its ranks; a load on other ranks says whose it wants."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_ckpt
from hyper_ckpt.errors import ConflictError, ManifestError, ShapeMismatchError, StateMismatchError
from hyper_ckpt.layout import Mesh, MeshLayout, Replicate, Shard
from hyper_ckpt.options import LoadOptions, SaveOptions
from hyper_ckpt.planning.items import ItemLoadPlanner, ItemSavePlanner
from hyper_ckpt.receipt import ZERO_DIGEST, seal
from hyper_ckpt.testing.meshed import distribute, meshed_platform
from hyper_ckpt.testing.world import run_world
from hyper_ckpt.values import PerRank, ShardedTensor

from .helpers import State, Stateful, fresh, load_on, same, save_on

SHAPES = [(2, 2), (600, 1024)]
"""Compared whole, and by samples."""


def expert(rank: int, shape: tuple[int, ...] = (2, 2)) -> State:
    return {"model": {"expert": np.full(shape, rank, "f4"), "shared": np.arange(6.0)}}


def blank(rank: int, shape: tuple[int, ...] = (2, 2)) -> State:
    return {"model": {"expert": np.full(shape, -1, "f4"), "shared": np.zeros(6)}}


def save_kept(world: int, of_rank: Callable[[int], State], url: str, **options: Any) -> list[str]:
    """Saves, and returns what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_world(
            world,
            lambda p: hyper_ckpt.save(of_rank(p.ranks.rank), url, platform=p, timeout=30, **options),
            platform=meshed_platform,
        )
    return [str(w.message) for w in caught]


def load_meshed(world: int, of_rank: Callable[[int], State], url: str, **options: Any) -> list[State]:
    def job(platform: Any) -> State:
        target = of_rank(platform.ranks.rank)
        hyper_ckpt.load(target, url, platform=platform, timeout=30, **options)
        return target

    return run_world(world, job, platform=meshed_platform)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share_reads", [True, False])
def test_each_rank_gets_its_own_back(shape: tuple[int, ...], share_reads: bool) -> None:
    url = fresh()
    texts = save_kept(3, lambda rank: expert(rank, shape), url)
    assert len(texts) == 3, "every rank says it"
    assert all("'model/expert'" in t and "experts" in t and "PerRank" in t and "shared'" not in t for t in texts)
    states, reports = load_on(3, lambda rank: blank(rank, shape), url, share_reads=share_reads, strict="exact")
    for rank, (state, report) in enumerate(zip(states, reports, strict=True)):
        assert same(state, expert(rank, shape))
        assert report.conflicts == {"model/expert": (rank,)}
        assert "1 conflicts" in repr(report)
        assert report.loaded == ("model/expert", "model/shared")
    assert hyper_ckpt.verify(url).ok


@pytest.mark.parametrize("world", [1, 2, 5])
def test_other_ranks_say_whose_they_want(world: int) -> None:
    url = fresh()
    save_kept(3, expert, url)
    with pytest.raises(
        ConflictError, match=r"'model/expert' .*ranks 0 / 1 / 2.*3 ranks saved it.*conflicts=0"
    ) as caught:
        load_on(world, blank, url)
    assert len(caught.value.problems) == 1
    for whose, rank in ((1, 1), (2, 2), ("lowest", 0)):
        states, reports = load_on(world, blank, url, options=LoadOptions(conflicts=whose))  # type: ignore[arg-type]
        assert all(same(s, expert(rank)) for s in states)
        assert all(r.conflicts == {"model/expert": (rank,)} for r in reports)
    with pytest.raises(ConflictError, match="rank 7 saved none"):
        load_on(world, blank, url, options=LoadOptions(conflicts=7))
    # What is not wanted need not be decided, and strict=False says what it left.
    states, reports = load_on(world, lambda rank: {"model": {"shared": np.zeros(6)}}, url, strict=False)
    assert all(r.mismatched == () for r in reports)
    assert all(same(s["model"]["shared"], np.arange(6.0)) for s in states)
    states, reports = load_on(world, blank, url, strict=False)
    assert all(same(s["model"]["expert"], blank(0)["model"]["expert"]) for s in states)
    assert all("model/expert" in r.mismatched[0] and r.conflicts == {} for r in reports)


def test_the_ranks_that_saved_may_choose_one_too() -> None:
    url = fresh()
    save_kept(3, expert, url)
    for share_reads in (True, False):
        states, _ = load_on(3, blank, url, options=LoadOptions(conflicts=2), share_reads=share_reads)
        assert all(same(s, expert(2)) for s in states)


def test_read_says_whose_it_wants() -> None:
    url = fresh()
    save_kept(3, expert, url)
    with pytest.raises(ConflictError, match=r"'model/expert'.*ranks 0 / 1 / 2.*conflicts=0"):
        hyper_ckpt.read(url)
    assert same(hyper_ckpt.read(url, keys=["model/shared"])["model"]["shared"], np.arange(6.0))
    assert same(hyper_ckpt.read(url, options=LoadOptions(conflicts=1)), expert(1))
    assert same(hyper_ckpt.read(url, options=LoadOptions(conflicts="lowest")), expert(0))


def test_the_choice_is_for_plain_values_too() -> None:
    url = fresh()
    save_kept(3, lambda rank: {"lr": rank, "w": np.full(2, rank)}, url)
    for whose, rank in ((2, 2), ("lowest", 0)):
        options = LoadOptions(conflicts=whose)  # type: ignore[arg-type]
        assert same(hyper_ckpt.read(url, options=options), {"lr": rank, "w": np.full(2, rank)})
        states, _ = load_on(2, lambda r: {"lr": -1, "w": np.full(2, -1)}, url, options=options)
        assert all(same(s, {"lr": rank, "w": np.full(2, rank)}) for s in states)


def test_equal_ones_are_stored_once_and_not_cut() -> None:
    """Of four ranks three hold the same, which above 1 MiB was not compared byte for byte: no rows of two of them."""
    url = fresh()
    save_kept(4, lambda rank: {"w": np.full((600, 1024), rank == 2, "f4")}, url)
    metadata = hyper_ckpt.read_metadata(url)
    assert metadata.conflicts == {"w": (((0, 1, 3), "w~r0"), ((2,), "w~r2"))}
    assert [len(metadata.storage_data[name]) for name in ("w~r0", "w~r2")] == [1, 1]
    assert sum(metadata.files.values()) < 2.1 * 600 * 1024 * 4
    states, _ = load_on(4, lambda rank: {"w": np.zeros((600, 1024), "f4")}, url)
    assert [int(s["w"].max()) for s in states] == [0, 0, 1, 0]


def test_ranks_that_hold_none() -> None:
    """Two stages of two ranks each: a rank that has a tensor only now must choose; "lowest" fits all."""
    url = fresh()

    def of_rank(rank: int) -> State:
        return {f"stage{rank // 2}": {"mean": np.full(3, float(rank))}}

    save_kept(4, of_rank, url)
    states, _ = load_on(4, lambda rank: {f"stage{rank // 2}": {"mean": np.zeros(3)}}, url)
    assert all(same(s, of_rank(rank)) for rank, s in enumerate(states))
    both = lambda rank: {f"stage{i}": {"mean": np.zeros(3)} for i in range(2)}  # noqa: E731
    with pytest.raises(ConflictError, match=r"'stage1/mean' was another tensor on ranks 2 / 3, and rank 0 saved none"):
        load_on(4, both, url)
    with pytest.raises(ConflictError, match="rank 0 saved none"):
        load_on(2, both, url, options=LoadOptions(conflicts=0))
    states, _ = load_on(2, both, url, options=LoadOptions(conflicts="lowest"))
    assert all(same(s, {**of_rank(0), **of_rank(2)}) for s in states)


@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("options", [{}, {"save_to_minimum_rank": True}, {"remove_redundancy": False}])
@pytest.mark.parametrize("kind", ["array", "boxes", "mesh", "mixed"])
def test_every_layout_of_whole_replicas(kind: str, options: dict[str, Any], share_reads: bool) -> None:
    def of_rank(rank: int, value: float | None = None) -> State:
        whole = np.full((600, 1024), rank if value is None else value, "f4")
        by_hand = ShardedTensor([(whole, (0, 0))], whole.shape)
        mesh = distribute(whole, MeshLayout(Mesh((3,), (0, 1, 2)), (Replicate(),)), rank)
        parts = {"array": whole, "boxes": by_hand, "mesh": mesh}
        return {"w": by_hand if kind == "mixed" and rank == 2 else parts.get(kind, whole), "same": np.ones((600, 1024))}

    url = fresh()
    assert len(save_kept(3, of_rank, url, **options)) == 3
    states = load_meshed(3, lambda rank: of_rank(rank, -1), url, share_reads=share_reads)
    for rank, state in enumerate(states):
        w = state["w"]
        data = w.local if kind == "mesh" else w.shards[0][0] if isinstance(w, ShardedTensor) else w
        assert (data == rank).all()
    assert (hyper_ckpt.read(url, options=LoadOptions(conflicts=1))["w"] == 1).all()


GROUPS = [((0, 1), (2, 3)), ((0, 2), (3, 1))]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("one_mesh", [True, False])
@pytest.mark.parametrize("uneven", [True, False])
def test_sharded_replicas_stay_together(groups: Any, one_mesh: bool, uneven: bool) -> None:
    """Two replicas of two shards, of which one shard differs: each replica is one tensor, none a mix of both."""
    rows = 1 if uneven else 600

    def replica(rank: int) -> int:
        return 0 if rank in groups[0] else 1

    def layout(rank: int) -> MeshLayout:
        if one_mesh:
            return MeshLayout(Mesh((2, 2), (*groups[0], *groups[1])), (Replicate(), Shard(0)))
        return MeshLayout(Mesh((2,), groups[replica(rank)]), (Shard(0),))

    def whole(number: int) -> np.ndarray:
        data = np.zeros((2 * rows - uneven, 1024), "f4")
        data[:rows] = number
        return data

    def of_rank(rank: int) -> State:
        return {"w": distribute(whole(replica(rank)), layout(rank), rank), "ok": np.ones(3)}

    url = fresh()
    assert len(save_kept(4, of_rank, url)) == 4
    assert hyper_ckpt.read_metadata(url).conflicts["w"] == tuple(
        sorted((tuple(sorted(g)), f"w~r{min(g)}") for g in groups)
    )
    for share_reads in (True, False):
        states = load_meshed(
            4,
            lambda rank: {"w": distribute(np.full_like(whole(0), 9), layout(rank), rank), "ok": np.zeros(3)},
            url,
            share_reads=share_reads,
        )
        assert all(same(s["w"].local, of_rank(rank)["w"].local) for rank, s in enumerate(states))
    # In another layout, on the same ranks: each gets the replica that it was a part of.
    states, _ = load_on(4, lambda rank: {"w": np.full_like(whole(0), 9)}, url)
    assert all(same(s["w"], whole(replica(rank))) for rank, s in enumerate(states))
    for rank in range(4):
        assert same(hyper_ckpt.read(url, options=LoadOptions(conflicts=rank))["w"], whole(replica(rank)))


def test_shards_that_are_listed_by_hand_make_replicas_in_order_of_ranks() -> None:
    def of_rank(rank: int) -> State:
        part = np.full((2, 3), rank, "f4")
        return {"w": ShardedTensor([(part, (2 * (rank % 2), 0))], (4, 3))}

    url = fresh()
    save_kept(4, of_rank, url)
    assert hyper_ckpt.read_metadata(url).conflicts == {"w": (((0, 1), "w~r0"), ((2, 3), "w~r2"))}
    found = hyper_ckpt.read(url, options=LoadOptions(conflicts=3))["w"]
    assert found[:, 0].tolist() == [2, 2, 3, 3]


def test_parts_that_make_no_replicas_are_refused() -> None:
    def of_rank(rank: int) -> State:
        shared, own = np.full((3, 4), rank, "f4"), np.full((2, 4), rank, "f4")
        return {"w": ShardedTensor([(shared, (0, 0)), (own, (3 + 2 * rank, 0))], (7, 4))}

    with pytest.raises(ConflictError, match=r"'w', in parts.*PerRank.*conflicts='warn'"):
        save_on(2, of_rank, fresh())
    texts = save_kept(2, of_rank, url := fresh(), options=SaveOptions(conflicts="warn"))
    assert len(texts) == 2
    assert hyper_ckpt.read(url)["w"][:, 0].tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_names_of_one_memory() -> None:
    def of_rank(rank: int) -> State:
        w = np.full(3, float(rank == 1))
        return {"a": w, "b": w, **({} if rank == 0 else {"c": w})}

    url = fresh()
    save_kept(3, of_rank, url)
    metadata = hyper_ckpt.read_metadata(url)
    assert metadata.conflicts["a"] == (((0, 2), "a~r0"), ((1,), "a~r1"))
    assert metadata.conflicts["c"] == (((1,), "c~r1"), ((2,), "c~r2"))
    place = {name: rows[0][1] for name, rows in metadata.storage_data.items()}
    assert place["a~r0"] == place["b~r0"] == place["c~r2"] != place["a~r1"] == place["b~r1"] == place["c~r1"]
    states, _ = load_on(3, lambda rank: {k: np.zeros(3) for k in of_rank(rank)}, url)
    assert all(same(s, of_rank(rank)) for rank, s in enumerate(states))

    def tied(rank: int) -> State:
        w = np.zeros(3)
        return dict.fromkeys(of_rank(rank), w)

    for share_reads in (True, False):
        states, _ = load_on(3, tied, url, share_reads=share_reads)
        assert all(same(s, of_rank(rank)) and s["a"] is s["b"] for rank, s in enumerate(states))


@pytest.mark.parametrize("share_reads", [True, False])
def test_item_planners(share_reads: bool) -> None:
    url = fresh()
    save_kept(3, expert, url, planner=ItemSavePlanner())

    class Shared(ItemLoadPlanner):
        """One rank reads everything for all."""

        def create_local_plan(self, tensors: Any, stored: Any, context: Any) -> Any:
            plan = super().create_local_plan(tensors, stored, context)
            items = [type(i)(i.index, i.sizes, reader=0, sharers=(0, 1, 2)) for i in plan.items]
            return type(plan)(tuple(items))

    for planner in (ItemLoadPlanner(), Shared()):
        states, _ = load_on(3, blank, url, planner=planner, share_reads=share_reads)
        assert all(same(s, expert(rank)) for rank, s in enumerate(states))


def test_ranks_that_load_without_talking() -> None:
    url = fresh()
    save_kept(3, expert, url)
    states, _ = load_on(3, blank, url, use_collectives=False)
    assert all(same(s, expert(rank)) for rank, s in enumerate(states))


def test_later_saves_and_other_groups() -> None:
    """Plans are kept from save to save: not across other groups of equal replicas, nor another way to settle them."""
    urls = [fresh() for _ in range(6)]
    ways = ["keep", "keep", "warn", "keep", "keep", "keep"]
    values = [(0, 1, 1), (5, 6, 6), (0, 1, 1), (0, 0, 1), (1, 1, 1), (0, 1, 1)]

    def job(platform: Any) -> None:
        for url, way, of in zip(urls, ways, values, strict=True):
            state = expert(of[platform.ranks.rank])
            options = SaveOptions(conflicts=way)  # type: ignore[arg-type]
            if url in urls[:2]:
                hyper_ckpt.async_save(state, url, platform=platform, options=options).result()
            else:
                hyper_ckpt.save(state, url, platform=platform, options=options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_world(3, job)
    for url, way, of in zip(urls, ways, values, strict=True):
        states, reports = load_on(3, blank, url)
        expected = [of[0]] * 3 if way == "warn" else of
        assert all(same(s, expert(value)) for s, value in zip(states, expected, strict=True))
        assert all(bool(r.conflicts) == (way == "keep" and len(set(of)) > 1) for r in reports)


def test_other_names() -> None:
    url = fresh()
    save_kept(3, expert, url)
    for share_reads in (True, False):
        states, reports = load_on(
            3,
            lambda rank: {"mine": np.zeros((2, 2), "f4")},
            url,
            options=LoadOptions(map_keys={"mine": "model/expert"}),
            strict=False,
            share_reads=share_reads,
        )
        assert all(same(s["mine"], expert(rank)["model"]["expert"]) for rank, s in enumerate(states))
        assert [r.conflicts for r in reports] == [{"mine": (0,)}, {"mine": (1,)}, {"mine": (2,)}]
    with pytest.raises(ConflictError, match="'mine' was another tensor on ranks 0 / 1 / 2"):
        load_on(
            1,
            lambda rank: {"mine": np.zeros((2, 2), "f4")},
            url,
            options=LoadOptions(map_keys={"mine": "model/expert"}),
        )


def test_beside_other_things_that_differ() -> None:
    """Kinds that differ, lists of other lengths, objects, PerRank: what stands in them is sorted out rank by rank."""

    def of_rank(rank: int) -> State:
        return {
            "kind": "text" if rank == 0 else np.full(2, float(rank)),
            "list": [np.full(2, float(rank)) for _ in range(1 + (rank > 0))],
            "object": Stateful(w=np.full(2, float(rank)), n=rank),
            "own": PerRank(np.full(2, rank)),
        }

    def target(rank: int) -> State:
        return {
            "kind": "" if rank == 0 else np.zeros(2),
            "list": [np.zeros(2) for _ in range(1 + (rank > 0))],
            "object": Stateful(w=np.zeros(2), n=-1),
            "own": PerRank(None),
        }

    url = fresh()
    save_kept(3, of_rank, url)
    states, _ = load_on(3, target, url, strict="exact")
    assert all(same(s, of_rank(rank)) for rank, s in enumerate(states))
    with pytest.warns(UserWarning, match="'own'"):  # positions in data may mean something else on other ranks
        states, _ = load_on(1, lambda rank: target(2), url, options=LoadOptions(conflicts=2))
    assert same({**states[0], "own": None}, {**of_rank(2), "own": None})
    with pytest.raises(StateMismatchError):
        load_on(1, lambda rank: target(2), url)


def test_the_names_of_variants_are_no_names_of_users() -> None:
    def of_rank(rank: int) -> State:
        return {"w": np.full(2, rank), "w~r0": np.full(2, 7), "w~r1": {"": np.full(2, 8)}, "": np.full(2, rank + 5)}

    url = fresh()
    save_kept(2, of_rank, url)

    def target(rank: int) -> State:
        none = np.zeros(2, int)
        return {"w": none.copy(), "w~r0": none.copy(), "w~r1": {"": none.copy()}, "": none.copy()}

    states, _ = load_on(2, target, url, strict="exact")
    assert all(same(s, of_rank(rank)) for rank, s in enumerate(states))


def lose(manifest: dict[str, Any], node: dict[str, Any]) -> None:
    """The state names a variant that is not stored."""
    node["v"][1][1]["rank"] = 9


def swap(manifest: dict[str, Any], node: dict[str, Any]) -> None:
    """One variant has another shape than the others."""
    manifest["tensors"]["w~r1"] = manifest["tensors"]["other"]


def shadow(manifest: dict[str, Any], node: dict[str, Any]) -> None:
    """A tensor of the very name stands beside the variants."""
    manifest["tensors"]["w"] = manifest["tensors"]["w~r0"]


@pytest.mark.parametrize(
    ("change", "error"), [(lose, ManifestError), (swap, ShapeMismatchError), (shadow, ConflictError)]
)
def test_hostile_variants(tmp_path: Path, change: Any, error: type[Exception]) -> None:
    path = tmp_path / "c"
    save_kept(2, lambda rank: {"w": np.full(2, float(rank)), "other": np.zeros(5)}, str(path))
    file = path / "manifest.json"
    manifest = json.loads(file.read_bytes())
    change(manifest, manifest["state"]["v"][manifest["state"]["k"].index("w")])
    manifest["digest"] = ZERO_DIGEST
    file.write_bytes(seal(json.dumps(manifest, separators=(",", ":")).encode())[0])
    target = {"w": np.full(2, -1.0), "other": np.zeros(5)}
    options = LoadOptions(conflicts="own" if change is shadow else 1)
    with pytest.raises(error):
        hyper_ckpt.load(target, path, no_dist=True, options=options)
    assert (target["w"] == -1).all()


@pytest.mark.parametrize("whose", [-1, 1.5, True, None, "own ", "highest"])
def test_a_choice_that_is_none(whose: Any) -> None:
    with pytest.raises(ValueError, match="conflicts"):
        LoadOptions(conflicts=whose)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_replicas(data: st.DataObject) -> None:
    """Whatever ranks hold in common or not: each gets its own back, a choice gives one rank's, nothing is lost."""
    world = data.draw(st.integers(2, 4))
    names = data.draw(st.lists(st.sampled_from(["a", "b", "c/d", ""]), min_size=1, max_size=3, unique=True))
    holds = {n: data.draw(st.lists(st.none() | st.integers(0, 2), min_size=world, max_size=world)) for n in names}
    meshed = {n: data.draw(st.booleans()) for n in names}

    def tensor(name: str, rank: int, value: float) -> Any:
        whole = np.full((3, 2), value)
        everywhere = None not in holds[name]
        return (
            distribute(whole, MeshLayout(Mesh((world,), tuple(range(world))), (Replicate(),)), rank)
            if (meshed[name] and everywhere)
            else whole
        )

    def of_rank(rank: int, fill: float | None = None) -> State:
        return {
            n: tensor(n, rank, float(v) if fill is None else fill)
            for n in names
            if (v := holds[n][rank]) is not None
        }  # fmt: skip

    url = fresh()
    save_kept(world, of_rank, url)
    share = data.draw(st.booleans())
    for rank, state in enumerate(load_meshed(world, lambda rank: of_rank(rank, -1.0), url, share_reads=share)):
        for name, value in state.items():
            assert (getattr(value, "local", value) == holds[name][rank]).all()
    rank = data.draw(st.integers(0, world - 1))
    keys = [n for n in names if holds[n][rank] is not None]
    if keys:
        found = hyper_ckpt.read(url, keys=[k.replace("/", "~1") for k in keys], options=LoadOptions(conflicts=rank))
        assert all((found[name] == holds[name][rank]).all() for name in keys)
