"""What ranks hold differently: values, tensors, payloads; and loading it in worlds of other sizes."""

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.errors import ConflictError, RanksDisagreeError, UnsupportedStateError
from hyper_ckpt.layout import Mesh, MeshLayout, Replicate, Shard
from hyper_ckpt.options import SaveOptions
from hyper_ckpt.planning import share
from hyper_ckpt.testing.meshed import distribute, meshed_platform
from hyper_ckpt.testing.world import run_world
from hyper_ckpt.values import PerRank, ShardedTensor

from .helpers import State, Stateful, fresh, load_on, same, save_on

REFUSE, LOWEST = SaveOptions(conflicts="error"), SaveOptions(conflicts="warn")


def of_ranks(rank: int) -> State:
    """Every kind of leaf that belongs to a rank."""
    return {
        "step": 7,
        "lr": [0.1 * (rank + 1)],
        "rng": PerRank({"state": rank, "draws": np.arange(rank + 1), "seen": (rank,) * rank}),
        "object": PerRank(Stateful(position=rank)),
        "large": PerRank("r" * (70_000 + rank)),
        "python": PerRank(random.Random(rank)),
        "w": np.arange(6.0),
    }


def blank(rank: int) -> State:
    return {
        "step": 0, "lr": [0.0], "rng": PerRank({"state": -1}), "object": PerRank(Stateful()), "large": PerRank(None),
        "python": PerRank(random.Random(99)), "w": np.zeros(6),
    }  # fmt: skip


def test_every_rank_gets_what_it_saved() -> None:
    url = fresh()
    with pytest.warns(UserWarning, match=r"'lr' on ranks 0 / 1 / 2"):
        save_on(3, of_ranks, url)
    states, reports = load_on(3, blank, url, strict="exact")
    for rank, state in enumerate(states):
        assert same(state, of_ranks(rank))
    assert not any(r.kept for r in reports)
    assert same(hyper_ckpt.read(url)["rng"], of_ranks(0)["rng"])


@pytest.mark.parametrize("world", [1, 2, 5])
def test_worlds_of_other_sizes(world: int) -> None:
    url, target = fresh(), dict[int, State]()
    with pytest.warns(UserWarning, match="lr"):
        save_on(3, of_ranks, url)

    def of_rank(rank: int) -> State:
        target[rank] = blank(rank)
        return target[rank]

    if world > 3:
        with pytest.warns(UserWarning, match="rank") as caught:
            states, reports = load_on(world, of_rank, url)
        texts = [str(w.message) for w in caught]
        assert any("rank 4" in t and "'rng'" in t and "were kept" in t for t in texts)
        assert any("rank 3" in t and "'lr'" in t and "lowest rank's" in t for t in texts)
    else:
        told = r"3 ranks saved this checkpoint and \d load it: of 'rng', 'object'.*positions in data"
        with pytest.warns(UserWarning, match=told) as caught:
            states, reports = load_on(world, of_rank, url)
        assert len(caught) == 1, "rank 0 says it"
    for rank, (state, report) in enumerate(zip(states, reports, strict=True)):
        expected = of_ranks(rank) if rank < 3 else {**blank(rank), "step": 7, "lr": [0.1], "w": np.arange(6.0)}
        assert same(state, expected)
        assert report.kept == (() if rank < 3 else ("rng", "object", "large", "python"))


@pytest.mark.parametrize("share_reads", [True, False])
def test_payloads_of_which_only_some_ranks_have_one(share_reads: bool) -> None:
    url = fresh()
    save_on(3, lambda rank: {"w": np.ones(2), **({"late": PerRank(rank)} if rank else {})}, url)
    with pytest.warns(UserWarning, match="'late' .* no rank 0"):
        states, reports = load_on(
            3, lambda rank: {"w": np.zeros(2), "late": PerRank(None)}, url, share_reads=share_reads
        )
    assert [s["late"].value for s in states] == [None, 1, 2]
    assert [r.kept for r in reports] == [("late",), (), ()]
    # `read` gives the lowest rank's that has any.
    assert hyper_ckpt.read(url)["late"].value == 1


def test_conflicts_are_named_with_their_ranks() -> None:
    def of_rank(rank: int) -> State:
        return {"a": {"x": rank % 2}, "b": "y" * (70_000 + (rank == 3)), "c": 1, "d": [np.ones(1), rank]}

    url = fresh()
    with pytest.warns(UserWarning, match="ranks") as caught:
        save_on(4, of_rank, url)
    (text,) = {str(w.message) for w in caught}
    assert all(part in text for part in ("'a/x' on ranks 0,2 / 1,3", "'b' on ranks 0,1,2 / 3", "'d/1'", "PerRank"))
    states, _ = load_on(4, lambda rank: {"a": {"x": 9}, "b": "", "c": 0, "d": [np.zeros(1), -1]}, url)
    assert all(same(s, of_rank(r)) for r, s in enumerate(states))
    with pytest.raises(ConflictError, match=r"'a/x' on ranks 0,2 / 1,3.*PerRank"):
        save_on(4, of_rank, fresh(), options=REFUSE)


def test_equal_values_are_no_conflict() -> None:
    save_on(
        3, lambda rank: {"nan": float("nan"), "d": dict(sorted({"b": 1, "a": 2}.items(), reverse=bool(rank)))}, fresh()
    )


def test_kinds_that_differ_are_kept_too() -> None:
    def of_rank(rank: int) -> State:
        return {"x": np.full(3, 5.0) if rank == 1 else "text", "y": PerRank(rank) if rank else [1]}

    url = fresh()
    with pytest.warns(UserWarning, match="'x'"):
        save_on(3, of_rank, url)
    states, _ = load_on(3, lambda rank: {"x": np.zeros(3) if rank == 1 else "", "y": PerRank(-1) if rank else [0]}, url)
    assert all(same(s, of_rank(r)) for r, s in enumerate(states))


ROWS = 600
MIB = 1 << 20


def differing(rank: int) -> np.ndarray:
    return np.full((ROWS, 1024), rank, "f4")


@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize("options", [{}, {"save_to_minimum_rank": True}, {"remove_redundancy": False}])
@pytest.mark.parametrize("kind", ["array", "boxes", "mesh", "mixed"])
def test_tensors_whose_replicas_differ_are_not_split(kind: str, options: dict[str, Any], share_reads: bool) -> None:
    def of_rank(rank: int) -> State:
        whole = differing(0 if kind == "mixed" and rank < 2 else rank)
        mesh = MeshLayout(Mesh((3,), (0, 1, 2)), (Replicate(),))
        by_hand = ShardedTensor([(whole, (0, 0))], whole.shape)
        parts = {"array": whole, "boxes": by_hand, "mesh": distribute(whole, mesh, rank)}
        return {"w": by_hand if kind == "mixed" and rank == 2 else parts.get(kind, whole), "same": differing(0)}

    url = fresh()
    with pytest.warns(UserWarning, match="different tensors under 'w'"):
        save_meshed(3, of_rank, url, options=LOWEST, **options)
    assert (hyper_ckpt.read(url)["w"] == 0).all()
    states, _ = load_on(3, lambda rank: {"w": differing(9), "same": differing(9)}, url, share_reads=share_reads)
    assert all((s["w"] == 0).all() and (s["same"] == 0).all() for s in states)
    with pytest.raises(ConflictError, match="'w'"):
        save_meshed(3, of_rank, fresh(), options=REFUSE, **options)


def test_a_box_that_differs_among_equal_ones() -> None:
    """Rank 1 holds another value of one of two boxes that ranks 0 and 1 both hold beside boxes of their own."""

    def of_rank(rank: int) -> State:
        shared = np.full((ROWS, 1024), rank, "f4")
        own = np.full((2, 1024), rank, "f4")
        return {"w": ShardedTensor([(shared, (0, 0)), (own, (ROWS + 2 * rank, 0))], (ROWS + 4, 1024))}

    url = fresh()
    with pytest.warns(UserWarning, match="different tensors under 'w'"):
        save_meshed(2, of_rank, url, options=LOWEST)
    found = hyper_ckpt.read(url)["w"]
    assert (found[: ROWS + 2] == 0).all()
    assert (found[ROWS + 2 :] == 1).all()


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 2), (3, 1))])
def test_replicas_that_differ_on_a_mesh(groups: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Only the shard on one mesh coordinate differs; every group of ranks has its own mesh."""

    def of_rank(rank: int) -> State:
        mesh = Mesh((2,), groups[0] if rank in groups[0] else groups[1])
        whole = np.zeros((2 * ROWS, 1024), "f4")
        if rank == groups[1][1]:
            whole[...] = 1
        return {"w": distribute(whole, MeshLayout(mesh, (Shard(0),)), rank), "ok": np.ones(3)}

    url = fresh()
    with pytest.warns(UserWarning, match="different tensors under 'w': "):
        save_meshed(4, of_rank, url, options=LOWEST)
    second = hyper_ckpt.read(url)["w"][ROWS:]
    assert len(np.unique(second)) == 1


def test_small_tensors_differ_in_any_bit_and_classes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "MIN_CUT_BYTES", 64)

    def of_rank(rank: int) -> State:
        w = np.zeros(1000, "u1")
        w[500] = rank == 2
        return {"w": w, **({"extra": np.ones(1)} if rank == 2 else {})}

    with pytest.warns(UserWarning, match="'w'"):
        save_on(3, of_rank, fresh())
    with pytest.raises(ConflictError, match="'w'"):
        save_on(3, of_rank, fresh(), options=REFUSE)


def save_meshed(world: int, of_rank: Callable[[int], State], url: str, **options: Any) -> None:
    run_world(
        world,
        lambda p: hyper_ckpt.save(of_rank(p.ranks.rank), url, platform=p, timeout=30, **options),
        platform=meshed_platform,
    )


def test_one_rank_cannot_save_its_state() -> None:
    for bad in (object(), np.array(["x"])):
        with pytest.raises(UnsupportedStateError, match=r"rank 1: .*'a/b'"):
            save_on(3, lambda rank, bad=bad: {"a": {"b": bad if rank == 1 else 1}}, fresh())


def test_options_that_differ_are_named() -> None:
    with pytest.raises(RanksDisagreeError, match=r"different overwrite.*rank 2"):
        run_world(3, lambda p: hyper_ckpt.save({}, "memory://tests/x", platform=p, overwrite=p.ranks.rank == 2))


def test_nothing_is_pickled_unless_allowed() -> None:
    value, url = Opaque(3), fresh()
    allowed = SaveOptions(allow_pickle=True)
    save_on(2, lambda rank: {"x": value, "r": PerRank(value)}, url, options=allowed)
    with pytest.raises(UnsupportedStateError, match="allow_pickle"):
        load_on(2, lambda rank: {"x": None, "r": PerRank(None)}, url)
    states, _ = load_on(
        2, lambda rank: {"x": None, "r": PerRank(None)}, url, options=hyper_ckpt.LoadOptions(allow_pickle=True)
    )
    assert [(s["x"].number, s["r"].value.number) for s in states] == [(3, 3)] * 2
    assert pickle.loads(pickle.dumps(value)).number == 3


class Opaque:
    def __init__(self, number: int) -> None:
        self.number = number
