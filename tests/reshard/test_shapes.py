"""Every small shape, cut in every small way, loaded in other worlds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.layout import Mesh, MeshLayout, Replicate, Replicated, Shard
from hyper_ckpt.testing.meshed import Meshed, distribute
from hyper_ckpt.values import ShardedTensor

from .worlds import State, check_filled, check_stored_once, filled, fresh, load_on, poisoned, read_back, save_on

SHAPES = [(), (0,), (0, 4), (1,), (1, 1, 1), (5, 2), (7, 3, 2)]
Whole = dict[str, np.ndarray]
Cutter = Callable[[np.ndarray, int, int], Any]


def whole_tensors(dtype: str = "float32") -> Whole:
    return {f"t{i}": filled(shape, dtype, i) for i, shape in enumerate(SHAPES)}


def uneven(length: int, parts: int) -> tuple[int, ...]:
    """Most of it first, one element last, nothing in between."""
    sizes = [0] * parts
    sizes[-1] = min(length, 1)
    sizes[0] += length - sizes[-1]
    return tuple(sizes)


def over_ranks(dim: int, sizes: Callable[[int, int], tuple[int, ...] | None]) -> Cutter:
    def one(array: np.ndarray, rank: int, world: int) -> Any:
        mesh = Mesh((world,), tuple(range(world)))
        if not array.ndim:
            return distribute(array, MeshLayout(mesh, (Replicate(),)), rank)
        at = dim % array.ndim
        return distribute(array, MeshLayout(mesh, (Shard(at, sizes(array.shape[at], world)),)), rank)

    return one


def over_grid(array: np.ndarray, rank: int, world: int) -> Any:
    if not array.ndim:
        return array.copy()
    layout = MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), (Shard(0), Shard(array.ndim - 1)), (1, 0))
    return distribute(array, layout, rank)


def by_hand(array: np.ndarray, rank: int, world: int) -> Any:
    """Two shards on every rank, from both ends inwards; those in the middle are empty, at the offsets of full ones."""
    if not array.ndim:
        return array.copy()
    n = array.shape[0]
    cuts = [min(i, n) for i in range(2 * world)] + [n]
    shards = []
    for i in (rank, 2 * world - 1 - rank):
        part = array[cuts[i] : cuts[i + 1]].copy()
        shards.append((part, (min(cuts[i], max(n - 1, 0)) if not part.size else cuts[i], *[0] * (array.ndim - 1))))
    return ShardedTensor(shards, array.shape)


def blank(value: Any) -> Any:
    """The same tensor with other contents."""
    if isinstance(value, ShardedTensor):
        return ShardedTensor([(blank(data), offsets) for data, offsets in value.shards], value.global_shape)
    if isinstance(value, Meshed):
        return Meshed(blank(value.local), value.shape, value.layout, value.rank, value.dtype, value.on_device)
    return poisoned(value.shape, value.dtype.name)


def state_of(whole: Whole, cutter: Cutter, world: int, fill: bool = True) -> Callable[[int], State]:
    def of_rank(rank: int) -> State:
        state = {name: cutter(array, rank, world) for name, array in whole.items()}
        return state if fill else {name: blank(value) for name, value in state.items()}

    return of_rank


CUTTERS: dict[str, Cutter] = {
    "first even": over_ranks(0, lambda n, parts: None),
    "last even": over_ranks(-1, lambda n, parts: None),
    "first uneven": over_ranks(0, uneven),
    "last uneven": over_ranks(-1, uneven),
    "by hand": by_hand,
    "replicated": lambda array, rank, world: array.copy(),
}
TARGETS = [(world, name) for world in (1, 2, 3, 4, 7) for name in CUTTERS]


@pytest.mark.parametrize("saved_as", [*CUTTERS, "grid"])
def test_any_way_of_cutting_loads_into_any_other(saved_as: str) -> None:
    whole, url = whole_tensors(), fresh()
    save_on(4, state_of(whole, over_grid if saved_as == "grid" else CUTTERS[saved_as], 4), url)
    check_stored_once(url, whole)
    read_back(url, whole)
    for number, (world, name) in enumerate(TARGETS):
        states, reports = load_on(
            world, state_of(whole, CUTTERS[name], world, fill=False), url, share_reads=bool((number + world) % 2)
        )
        check_filled(states, whole)
        assert all(r.loaded == tuple(sorted(whole)) and not r.unexpected for r in reports)
    for share_reads in (True, False):
        states, _ = load_on(4, state_of(whole, over_grid, 4, fill=False), url, share_reads=share_reads)
        check_filled(states, whole)


@pytest.mark.parametrize("verify", ["off", "during", "before"])
@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("options", [{}, {"remove_redundancy": False}, {"save_to_minimum_rank": True}])
def test_modes(options: dict[str, Any], share_reads: bool, verify: Any) -> None:
    whole, url = whole_tensors("bfloat16"), fresh()

    def of_rank(rank: int) -> State:
        mesh = Mesh((2, 2), (0, 1, 2, 3))
        parts = {n: distribute(a, MeshLayout(mesh, (Replicate(), Shard(0))), rank) for n, a in whole.items() if a.ndim}
        return {"t0": whole["t0"].copy(), **parts}

    save_on(4, of_rank, url, **options)
    read_back(url, whole)
    copies = {len(hyper_ckpt.read_metadata(url).storage_data[name]) for name in ("t5", "t6")}
    assert copies == ({4} if "remove_redundancy" in options else {2})
    for world, name in ((2, "last uneven"), (4, "replicated"), (3, "by hand")):
        target = state_of(whole, CUTTERS[name], world, fill=False)
        states, _ = load_on(world, target, url, share_reads=share_reads, verify=verify)
        check_filled(states, whole)


def test_every_holder_stores_its_copy() -> None:
    whole, url = {"w": filled((300, 7)), "s": filled(())}, fresh()
    save_on(3, lambda rank: {n: a.copy() for n, a in whole.items()}, url, remove_redundancy=False)
    metadata = hyper_ckpt.read_metadata(url)
    for name in whole:
        rows = metadata.storage_data[name]
        assert [where.copy for _, where in rows] == [0, 1, 2]
        assert len({where.relative_path for _, where in rows}) == 3
    read_back(url, whole)


def test_the_lowest_holder_stores_all() -> None:
    whole, url = {"w": filled((1 << 19, 2)), "s": filled(())}, fresh()
    save_on(3, lambda rank: {n: a.copy() for n, a in whole.items()}, url, save_to_minimum_rank=True)
    metadata = hyper_ckpt.read_metadata(url)
    assert [n.split("-")[1] for n in metadata.files] == ["00000"]
    check_stored_once(url, whole)


def test_an_empty_shard_lies_where_a_full_one_does() -> None:
    whole, url = {"w": filled((4, 3))}, fresh()

    def of_rank(rank: int) -> State:
        full, empty = (whole["w"][2 * rank : 2 * rank + 2], (2 * rank, 0)), (np.empty((0, 3), "f4"), (2 * rank, 0))
        return {"w": ShardedTensor([empty, full] if rank else [full, empty], (4, 3))}

    def target(rank: int) -> State:
        return {"w": ShardedTensor([(np.empty((0, 3), "f4"), (1, 0)), (poisoned((2, 3)), (2 * rank, 0))], (4, 3))}

    save_on(2, of_rank, url)
    check_stored_once(url, whole)
    check_filled(load_on(2, target, url)[0], whole)


@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("none", [((0,), (0, 0)), ((0, 0), (9, 9)), ((7, 0), (0, 0)), ((0, 3, 1), ())])
def test_the_shape_and_place_of_an_empty_shard_do_not_matter(share_reads: bool, none: Any) -> None:
    whole, url = {"w": filled((4, 3)), "s": filled(())}, fresh()

    def on(rank: int, w: np.ndarray, s: np.ndarray) -> State:
        if rank:
            return {name: ShardedTensor([(np.empty(none[0], "f4"), none[1])], whole[name].shape) for name in whole}
        return {"w": ShardedTensor([(w, (0, 0))], (4, 3)), "s": ShardedTensor([(s, ())], ())}

    save_on(2, lambda rank: on(rank, whole["w"], whole["s"]), url)
    check_stored_once(url, whole)
    targets, _ = load_on(2, lambda rank: on(rank, poisoned((4, 3)), poisoned(())), url, share_reads=share_reads)
    check_filled(targets[:1], whole)


@pytest.mark.parametrize("share_reads", [True, False])
def test_tensors_on_a_device_go_through_the_stager(share_reads: bool) -> None:
    whole = {"a": filled((700, 900)), "b": filled((0, 3)), "c": filled((), "float64"), "d": filled((1000, 3), "int16")}
    url = fresh()

    def of_rank(world: int, fill: bool) -> Callable[[int], State]:
        def one(rank: int) -> State:
            layout = MeshLayout(Mesh((world,), tuple(range(world))), (Shard(0),))
            whole_here = {n: a if fill else poisoned(a.shape, a.dtype.name) for n, a in whole.items()}
            layouts = {"a": layout, "b": layout, "c": Replicated(), "d": Replicated()}
            return {n: distribute(whole_here[n], layouts[n], rank, on_device=True) for n in whole}

        return one

    save_on(3, of_rank(3, True), url)
    check_stored_once(url, whole)
    read_back(url, whole)
    for world in (1, 2, 4):
        check_filled(load_on(world, of_rank(world, False), url, share_reads=share_reads)[0], whole)


@pytest.mark.parametrize("share_reads", [True, False])
def test_targets_without_memory_are_replaced(share_reads: bool) -> None:
    whole, url = {"a": filled((6, 4)), "b": filled((5,), "bfloat16")}, fresh()
    save_on(2, lambda rank: {"x": [{"a": whole["a"].copy()}], "y": (whole["b"].copy(), 1)}, url)

    def target(rank: int) -> State:
        split = MeshLayout(Mesh((3,), (0, 1, 2)), (Shard(0),))
        return {
            "x": [{"a": Meshed(None, (6, 4), split, rank, "float32")}],
            "y": (Meshed(None, (5,), Replicated(), rank, "bfloat16"), 0),
        }

    states, _ = load_on(3, target, url, share_reads=share_reads)
    check_filled([{"a": s["x"][0]["a"], "b": s["y"][0]} for s in states], whole)
    assert [s["y"][1] for s in states] == [1, 1, 1]
