"""Tensors that are one memory: stored once, by value, and loaded once, whatever the ranks know of it."""

from collections.abc import Callable

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import TargetError
from hyper_ckpt.layout import Mesh, MeshLayout, Shard
from hyper_ckpt.testing.meshed import Meshed, distribute, meshed_platform
from hyper_ckpt.testing.world import run_world
from hyper_ckpt.values import ShardedTensor

from .helpers import State, fresh, load_on, same, save_on

W = np.arange(12, dtype="f4").reshape(4, 3)


def stored_bytes(url: str) -> int:
    """Distinct bytes that tensors lie in."""
    metadata = hyper_ckpt.read_metadata(url)
    runs = {(w.relative_path, w.offset, w.length) for rows in metadata.storage_data.values() for _, w in rows}
    return sum(length for _, _, length in runs)


def save_meshed(world: int, of_rank: Callable[[int], State], url: str) -> list[hyper_ckpt.Metadata]:
    return run_world(
        world,
        lambda p: hyper_ckpt.save(of_rank(p.ranks.rank), url, platform=p, timeout=30),
        platform=meshed_platform,
    )


def load_meshed(world: int, of_rank: Callable[[int], State], url: str, share_reads: bool) -> list[State]:
    def job(platform: Platform) -> State:
        state = of_rank(platform.ranks.rank)
        report = hyper_ckpt.load(state, url, platform=platform, timeout=30, share_reads=share_reads)
        assert set(report.loaded) == set(state)
        return state

    return run_world(world, job, platform=meshed_platform)


@pytest.mark.parametrize("world", [1, 3])
def test_ties_are_stored_once_and_known_to_every_rank(world: int) -> None:
    def of_rank(rank: int) -> State:
        w = W.copy()
        return {"head": w, "embedding": w, "view": w[1:3], "again": w[1:3], "other": w.copy()}

    url = fresh()
    rows = save_on(world, of_rank, url)
    assert stored_bytes(url) == 48 + 24 + 48
    for row in (*rows, hyper_ckpt.read_metadata(url)):
        assert set(row.state_dict_metadata) == {"head", "embedding", "view", "again", "other"}
        assert all(row.state_dict_metadata[name].size for name in row.state_dict_metadata)
    assert all(same(value, W if len(value) == 4 else W[1:3]) for value in hyper_ckpt.read(url).values())
    for make in (of_rank, lambda rank: {name: value.copy() for name, value in of_rank(rank).items()}):
        states, reports = load_on(world, lambda rank, make=make: {n: v * 0 for n, v in make(rank).items()}, url)
        assert all(same(s["head"], W) and same(s["embedding"], W) for s in states)
        assert all(set(r.loaded) == set(states[0]) for r in reports)


@pytest.mark.parametrize("share_reads", [True, False])
def test_a_target_may_be_tied_where_the_saved_state_was_not(share_reads: bool) -> None:
    """If equal values were saved: else one of them would be lost."""
    url = fresh()
    save_on(2, lambda rank: {"a": W.copy(), "b": W + 1, "c": W.copy()}, url)
    one = np.zeros_like(W)
    with pytest.raises(TargetError, match="'b' and 'a' are one tensor"):
        load_on(2, lambda rank: {"a": one, "b": one}, url, share_reads=share_reads)
    assert not one.any()
    _, reports = load_on(2, lambda rank: {"a": one, "c": one}, url, share_reads=share_reads)
    assert same(one, W)
    assert all(report.loaded == ("a", "c") for report in reports)


@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("change", [0, 1])
def test_ties_outside_host_memory(share_reads: bool, change: int) -> None:
    layout = MeshLayout(Mesh((2,), (0, 1)), (Shard(0),))

    def of_rank(rank: int, *wholes: np.ndarray) -> State:
        parts = [distribute(whole, layout, rank, on_device=True) for whole in wholes]
        return dict(zip("ab", parts if len(parts) == 2 else parts * 2, strict=True))

    url = fresh()
    save_meshed(2, lambda rank: of_rank(rank, W, W + np.array([[0], [0], [0], [change]], "f4")), url)
    if change:
        with pytest.raises(TargetError, match="are one tensor"):
            load_meshed(2, lambda rank: of_rank(rank, W * 0), url, share_reads)
    else:
        states = load_meshed(2, lambda rank: of_rank(rank, W * 0), url, share_reads)
        assert all(same(state["a"].local, W[2 * rank : 2 * rank + 2]) for rank, state in enumerate(states))


@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4])
def test_ties_of_shards_of_which_some_are_empty(length: int, share_reads: bool) -> None:
    whole = np.arange(length * 2, dtype="f4").reshape(length, 2)

    def of_rank(world: int, fill: bool) -> Callable[[int], State]:
        def one(rank: int) -> State:
            layout = MeshLayout(Mesh((world,), tuple(range(world))), (Shard(0),))
            part = distribute(whole if fill else whole * 0 - 1, layout, rank)
            return {"in": part, "out": Meshed(part.local, part.shape, layout, rank, "float32")}

        return one

    url = fresh()
    save_meshed(4, of_rank(4, True), url)
    assert stored_bytes(url) == whole.nbytes
    for world in (1, 2, 4, 5):
        for state in load_meshed(world, of_rank(world, False), url, share_reads):
            for value in state.values():
                (start, *_), (size, *_) = value.box
                assert same(value.local, whole[start : start + size])


def test_a_tie_that_not_every_holder_has_is_none() -> None:
    def of_rank(rank: int) -> State:
        w = W.copy()
        return {"a": w, "b": w if rank else w.copy()}

    url = fresh()
    save_on(2, of_rank, url)
    assert stored_bytes(url) == 96
    for share_reads in (True, False):
        states, _ = load_on(2, lambda rank: {n: v * 0 for n, v in of_rank(rank).items()}, url, share_reads=share_reads)
        assert all(same(s["a"], W) and same(s["b"], W) for s in states)
    untied = fresh()
    save_on(2, lambda rank: (lambda w: {"a": w, "b": w})(W.copy()), untied)
    for share_reads in (True, False):
        states, _ = load_on(2, of_rank, untied, share_reads=share_reads)
        assert all(same(s["a"], W) and same(s["b"], W) for s in states)


def test_one_memory_in_two_tensors_of_different_shapes() -> None:
    """A rank's shard of a large tensor may be all of another one."""
    x, y = W[:2].copy(), W[2:].copy()

    def of_rank(rank: int) -> State:
        return {"a": ShardedTensor([(y, (2, 0)) if rank else (x, (0, 0))], (4, 3)), **({} if rank else {"b": x})}

    url = fresh()
    save_meshed(2, of_rank, url)
    state = hyper_ckpt.read(url)
    assert same(state["a"], W)
    assert same(state["b"], x)


def test_a_reshaped_view_is_no_tie() -> None:
    url, w = fresh(), W.copy()
    hyper_ckpt.save({"a": w, "b": w.reshape(3, 4), "c": w.T, "d": w.view("i4")}, url)
    state = hyper_ckpt.read(url)
    assert same(state["b"], W.reshape(3, 4))
    assert same(state["c"], np.ascontiguousarray(W.T))
    assert same(state["d"], W.view("i4"))


@pytest.mark.parametrize("alias", ["flat", "transposed", "bits", "part", "interleaved"])
def test_targets_that_share_elements_in_another_form(alias: str) -> None:
    """The same bytes under another shape or dtype: two saved values, one memory."""
    url = fresh()
    w = np.zeros((4, 6), "f4")
    views = {
        "flat": w.reshape(-1),
        "transposed": w.T,
        "bits": w.view("i4"),
        "part": w[1:3, 2:],
        "interleaved": w[:, ::2],
    }
    other = views[alias]
    hyper_ckpt.save({"w": np.ones((4, 6), "f4"), "x": np.full(other.shape, 2, other.dtype)}, url)
    with pytest.raises(TargetError, match=r"'w' and 'x' share memory|'x' and 'w' share memory"):
        hyper_ckpt.load({"w": w, "x": other}, url)
    assert not w.any()


def test_targets_side_by_side_in_one_memory() -> None:
    url = fresh()
    hyper_ckpt.save({"a": np.ones((4, 3)), "b": np.full((4, 3), 2.0)}, url)
    both = np.zeros((4, 6))
    hyper_ckpt.load({"a": both[:, ::2], "b": both[:, 1::2]}, url)
    assert both[0].tolist() == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize(("one", "other"), [((0, 4), (0, 4)), ((0, 4), (2, 6))])
@pytest.mark.parametrize("length", [1, 300_000])
def test_shards_of_one_tensor_must_not_share_memory(one: tuple[int, int], other: tuple[int, int], length: int) -> None:
    url = "memory://ties/shards-in-one-place"
    hyper_ckpt.save({"w": np.arange(8.0 * length)}, url, no_dist=True, overwrite=True)
    memory = np.zeros(6 * length)
    parts = [memory[low * length : high * length] for low, high in (one, other)]
    target = ShardedTensor([(parts[0], (0,)), (parts[1], (4 * length,))], (8 * length,))
    with pytest.raises(TargetError, match="two shards of 'w' share memory"):
        hyper_ckpt.load({"w": target}, url, no_dist=True)
    assert not memory.any()
