"""What a load refuses, what it reports, and what it leaves as it was."""

import uuid
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import (
    CheckpointNotFoundError,
    ContainerMismatchError,
    DtypeMismatchError,
    MissingKeyError,
    ShapeMismatchError,
    StateMismatchError,
    TargetError,
    UnexpectedKeyError,
)
from hyper_ckpt.testing.world import run_world
from hyper_ckpt.values import PerRank, ShardedTensor

from .helpers import Point, State, copied, fresh, load_on, same, save_on


def saved_state() -> State:
    return {
        "w": np.arange(6, dtype="f4").reshape(2, 3),
        "opt": {"step": 3, "m": np.arange(4.0), "groups": [{"lr": 0.5}, {"lr": 1.0}]},
        "list": [1, 2, 3],
        "pair": (1, np.ones(2)),
        "rng": PerRank([1]),
        "big": "x" * 70_000,
    }


def blank_state() -> State:
    return {
        "w": np.zeros((2, 3), "f4"),
        "opt": {"step": 0, "m": np.zeros(4), "groups": [{"lr": 0.0}, {"lr": 0.0}]},
        "list": [0, 0, 0],
        "pair": (0, np.zeros(2)),
        "rng": PerRank(None),
        "big": "",
    }


@pytest.fixture(params=[1, 3])
def saved(request: pytest.FixtureRequest) -> tuple[str, int]:
    url = fresh()
    save_on(request.param, lambda rank: saved_state(), url)
    return url, request.param


def changed(**changes: Any) -> State:
    """The blank state with changes; a value of `...` removes the key."""
    state = blank_state()
    for name, value in changes.items():
        *path, last = name.split("__")
        at = state
        for part in path:
            at = at[part]
        if value is ...:
            del at[last]
        else:
            at[last] = value
    return state


CASES: list[tuple[dict[str, Any], type[StateMismatchError], str]] = [
    ({"new": np.zeros(1)}, MissingKeyError, "'new' is not in the checkpoint"),
    ({"opt__new": 1}, MissingKeyError, "'opt/new'"),
    ({"new": PerRank(1)}, MissingKeyError, "'new'"),
    ({"new": {}}, MissingKeyError, "'new'"),
    ({"w": np.zeros((3, 2), "f4")}, ShapeMismatchError, r"'w' was saved with shape \(2, 3\), the target has \(3, 2\)"),
    ({"w": np.zeros(6, "f4")}, ShapeMismatchError, "'w'"),
    ({"w": ShardedTensor([(np.zeros((2, 3), "f4"), (0, 0))], (2, 4))}, ShapeMismatchError, r"\(2, 4\)"),
    ({"w": np.zeros((2, 3), "i4")}, DtypeMismatchError, "'w' was saved as float32, the target is int32"),
    ({"w": np.zeros((2, 3), "f8")}, DtypeMismatchError, "float64"),
    ({"list": [0, 0]}, ContainerMismatchError, "'list': the target has 2 items, the checkpoint 3: an object with"),
    ({"list": [0] * 4}, ContainerMismatchError, "'list'"),
    ({"list": (0, 0, 0)}, ContainerMismatchError, "'list': the target has a tuple, the checkpoint a list"),
    ({"list": {0: 1}}, ContainerMismatchError, "'list'"),
    ({"pair": Point(0, np.zeros(2))}, ContainerMismatchError, "'pair'"),
    ({"w": 1}, ContainerMismatchError, "'w': the target has a plain value, the checkpoint a tensor"),
    ({"big": np.zeros(1)}, ContainerMismatchError, "'big'"),
    ({"rng": None}, ContainerMismatchError, "'rng'"),
]  # fmt: skip


@pytest.mark.parametrize("share_reads", [True, False])
@pytest.mark.parametrize(("changes", "kind", "text"), CASES)
def test_misfits_are_refused_before_anything_is_loaded(
    saved: tuple[str, int], changes: dict[str, Any], kind: type[StateMismatchError], text: str, share_reads: bool
) -> None:
    url, world = saved
    targets = [changed(**changes) for _ in range(world)]
    before = copied({"s": [{k: v for k, v in t.items() if not isinstance(v, ShardedTensor)} for t in targets]})
    with pytest.raises(kind, match=text) as caught:
        load_on(world, targets.__getitem__, url, share_reads=share_reads)
    assert type(caught.value) is kind
    assert len(caught.value.problems) == 1
    assert "strict=False" in str(caught.value)
    after = {"s": [{k: v for k, v in t.items() if not isinstance(v, ShardedTensor)} for t in targets]}
    assert same(after, before)


@pytest.mark.parametrize(("changes", "kind", "text"), CASES)
def test_not_strict_loads_what_matches(
    saved: tuple[str, int], changes: dict[str, Any], kind: type[StateMismatchError], text: str
) -> None:
    url, world = saved
    states, reports = load_on(world, lambda rank: changed(**copied(changes)), url, strict=False)
    ((path, _),) = changes.items()
    top = path.split("__")[0]
    for state, report in zip(states, reports, strict=True):
        expected = saved_state()
        for name in state.keys() - {top}:
            assert same(state[name], expected[name])
        if kind is MissingKeyError:
            assert report.missing == (path.replace("__", "/"),)
            assert not report.mismatched
        else:
            (problem,) = report.mismatched
            assert f"'{top}'" in problem
            assert not report.missing
        assert top != "w" or "w" not in report.loaded


def test_all_problems_come_in_one_error(saved: tuple[str, int]) -> None:
    url, world = saved
    target = lambda rank: changed(a=1, b=np.zeros(1), w=np.zeros(1, "f4"), opt__m=np.zeros(4, "f4"), list=[])  # noqa: E731
    with pytest.raises(StateMismatchError) as caught:
        load_on(world, target, url)
    assert type(caught.value) is StateMismatchError
    assert len(caught.value.problems) == 5
    assert all(f"'{name}'" in str(caught.value) for name in ("a", "b", "w", "opt/m", "list"))


def test_unexpected_keys_are_reported_or_refused(saved: tuple[str, int]) -> None:
    url, world = saved
    target = lambda rank: changed(w=..., opt__groups=..., rng=...)  # noqa: E731
    # What is left out whole is meant; of "opt" the target wants a part.
    with pytest.warns(UserWarning, match=r"2 saved values were not loaded.*'opt/groups/0/lr'"):
        states, reports = load_on(world, target, url)
    assert all(set(r.unexpected) == {"w", "opt/groups/0/lr", "opt/groups/1/lr", "rng"} for r in reports)
    assert all(r.loaded == ("opt/m", "pair/1") for r in reports)
    assert states[0]["opt"]["step"] == 3
    with pytest.raises(UnexpectedKeyError, match="'w' is in the checkpoint, but not in the target"):
        load_on(world, target, url, strict="exact")
    load_on(world, lambda rank: blank_state(), url, strict="exact")


def test_a_state_of_an_optimizer_that_has_not_stepped(saved: tuple[str, int]) -> None:
    """What the target has not created yet is not restored, and a warning and the report say so."""
    with pytest.warns(UserWarning, match=r"4 saved values were not loaded.*'opt/step', 'opt/m'.*put the object itself"):
        _, reports = load_on(saved[1], lambda rank: changed(opt={}), saved[0])
    load_on(saved[1], lambda rank: changed(opt={}), saved[0], strict=False)  # meant: no warning
    assert all("opt/m" in r.unexpected and "opt/step" in r.unexpected for r in reports)


def test_one_rank_of_several_does_not_fit() -> None:
    url = fresh()
    save_on(3, lambda rank: saved_state(), url)
    with pytest.raises(MissingKeyError, match=r"rank 1: .*'new'"):
        load_on(3, lambda rank: changed(new=1) if rank == 1 else blank_state(), url)
    with pytest.raises(StateMismatchError, match=r"rank 0: .*\(9,\)"):
        load_on(3, lambda rank: blank_state() if rank else changed(w=np.zeros(9, "f4")), url)


@pytest.mark.parametrize("share_reads", [True, False])
def test_ranks_that_want_different_things(share_reads: bool) -> None:
    """A rank whose tensor does not fit keeps it; what the others share reaches them all the same."""
    url = fresh()
    save_on(3, lambda rank: saved_state(), url)
    states, reports = load_on(
        3,
        lambda rank: changed(w=np.zeros((2, 3), "i4" if rank == 1 else "f4")),
        url,
        strict=False,
        share_reads=share_reads,
    )
    assert [("w" in r.loaded) for r in reports] == [True, False, True]
    assert all(same(states[r]["w"], saved_state()["w"]) for r in (0, 2))
    states, _ = load_on(3, lambda rank: {"w": np.zeros((2, 3), "f4")} if rank else {}, url, share_reads=share_reads)
    assert all(same(s["w"], saved_state()["w"]) for s in states[1:])


def test_targets_that_cannot_be_written(saved: tuple[str, int]) -> None:
    url, world = saved
    frozen = np.zeros((2, 3), "f4")
    frozen.flags.writeable = False
    for bad in (
        frozen,
        np.broadcast_to(np.zeros(3, "f4"), (2, 3)),
        np.lib.stride_tricks.as_strided(np.zeros(6, "f4"), (2, 3), (4, 4)),
    ):
        states = [changed(w=bad) for _ in range(world)]
        with pytest.raises(TargetError, match=r"'w'.*load into a copy"):
            load_on(world, states.__getitem__, url)
        assert not states[0]["opt"]["m"].any()
        assert states[0]["opt"]["step"] == 0


def test_options_are_checked_first() -> None:
    for options in ({"strict": "yes"}, {"verify": "maybe"}):
        with pytest.raises(ValueError, match=next(iter(options.values()))):
            hyper_ckpt.load({}, fresh(), **options)
    with pytest.raises(ValueError, match="checkpoint_id"):
        hyper_ckpt.load({})
    with pytest.raises(CheckpointNotFoundError, match="memory://"):
        load_on(2, lambda rank: {}, fresh())


def test_read_gives_parts() -> None:
    url = fresh()
    save_on(2, lambda rank: saved_state(), url)
    expected = saved_state()
    assert same(hyper_ckpt.read(url, keys=["w"]), {"w": expected["w"]})
    assert same(
        hyper_ckpt.read(url, keys=["opt/groups", "big"]),
        {"opt": {"groups": expected["opt"]["groups"]}, "big": expected["big"]},
    )
    assert same(hyper_ckpt.read(url, keys=["pair/1"])["pair"], expected["pair"])
    with pytest.raises(MissingKeyError, match="'nope'"):
        hyper_ckpt.read(url, keys=["nope", "w"])


def test_containers_are_remade_where_they_must_be() -> None:
    url = fresh()
    state = {"t": (1, [2, (3, np.arange(2))]), "n": Point({"a": 1}, (np.ones(1),)), "d": {"x": (None, 1.5)}}
    save_on(2, lambda rank: copied(state), url)
    inner, array, named = [0, (0, np.zeros(2, "i8"))], np.zeros(1), {"a": 0}
    target = {"t": (0, inner), "n": Point(named, (array,)), "d": {"x": (0, 0)}}
    outer, n, d = target["t"], target["n"], target["d"]
    hyper_ckpt.load(target, url)
    assert same(target, state)
    assert target["d"] is d
    assert target["n"] is n
    assert n.x is named
    assert n.y[0] is array
    assert target["t"] is not outer
    assert target["t"][1] is inner


def test_what_another_rank_wants_is_not_unexpected() -> None:
    """Stages of a pipeline: each rank wants its own part of what all saved together."""
    url = f"memory://tests/{uuid.uuid4().hex}"

    def stage(platform: Platform) -> dict[str, Any]:
        return {f"stage{platform.ranks.rank}": {"w": np.full(3, platform.ranks.rank)}, "step": 1}

    def load(platform: Platform) -> tuple[str, ...]:
        target = {f"stage{platform.ranks.rank}": {"w": np.zeros(3, int)}, "step": 0}
        return hyper_ckpt.load(target, url, platform=platform, strict="exact").unexpected

    run_world(3, lambda p: hyper_ckpt.save(stage(p), url, platform=p))
    assert run_world(3, load) == [(), (), ()]
    with pytest.raises(UnexpectedKeyError, match="'stage2/w' is in the checkpoint"):
        run_world(2, load)


def test_dicts_of_all_kinds_fit_each_other(saved: tuple[str, int]) -> None:
    """`dict(model.state_dict())` of what was an OrderedDict; the target's own kind stays, and its keys are compared."""
    url, world = saved
    states, _ = load_on(world, lambda rank: changed(opt=OrderedDict(blank_state()["opt"])), url)
    assert all(type(s["opt"]) is OrderedDict and s["opt"]["step"] == 3 for s in states)
    with pytest.raises(MissingKeyError, match="'opt/new' is not in the checkpoint"):
        load_on(world, lambda rank: changed(opt=OrderedDict(blank_state()["opt"], new=1)), url)
