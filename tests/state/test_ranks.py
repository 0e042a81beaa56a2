"""States of several ranks: digests, merging, selecting, comparing."""

import time
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from hyper_ckpt.errors import ManifestError
from hyper_ckpt.state import Conflict, compare, merge, rebuild, select, skeleton, values_digest
from hyper_ckpt.values import PerRank

from ._same import Counting, make_array, same, save
from .strategies import Point, plain_states, states

T = np.ones(1)


def tree(state: dict) -> Any:
    return save(state).tree


def built(node: Any) -> dict:
    return rebuild(node, tensor=lambda name: T, payload=lambda name: None, blob=lambda *_: b"", make_tensor=make_array)


def differences(target: dict, saved: dict) -> list[tuple[str, str]]:
    return [(each.kind, each.name) for each in compare(tree(target), tree(saved))]


def backwards(state: dict) -> dict:
    return dict(reversed(state.items()))


@given(states)
def test_order_of_keys_and_plain_values_are_not_in_the_skeleton(state: dict) -> None:
    one, other = {**state, "step": [1], "z": T}, {"z": T, "step": "x", **backwards(state)}
    same_keys = "step" not in state and "z" not in state
    assert not same_keys or skeleton(tree(one)) == skeleton(tree(other))
    assert values_digest(tree(state)) == values_digest(tree(backwards(state)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": T}, {"a": 1}),
        ({"a": T}, {"b": T}),
        ({"a": T}, {"a": PerRank(1)}),
        ({"a": [T]}, {"a": (T,)}),
        ({"a": [T]}, {"a": [T, 1]}),
        ({"a": {"b": T}}, {"a": OrderedDict(b=T)}),
        ({"a": Point(T, 1)}, {"a": (T, 1)}),
        ({"a": Counting(w=T)}, {"a": {"w": T}}),
        ({"a": {"b": T}}, {"a.b": T}),
        ({1: T}, {"1": T}),
    ],
)
def test_skeletons_differ(one: dict, other: dict) -> None:
    assert skeleton(tree(one)) != skeleton(tree(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": []}, {"a": ()}),
        ({"a": 1}, {"b": 1}),
        ({"a": {}}, {}),
        ({"a": [1, T]}, {"a": [T, 1]}),
        ({"a": {}}, {"a": OrderedDict()}),
        ({"a": "x" * 70_000}, {"a": "x" * 70_001}),
    ],
)
def test_digests_differ(one: dict, other: dict) -> None:
    assert values_digest(tree(one)) != values_digest(tree(other))


def test_tensors_and_payloads_are_in_no_digest() -> None:
    one = {"w": T, "l": {"v": T}, "r": PerRank(1), "s": 1}
    assert values_digest(tree(one)) == values_digest(tree({"s": 1}))


@given(plain_states, plain_states)
def test_digests_tell_states_apart(one: dict, other: dict) -> None:
    if not same(one, other) and len(one) == len(other) <= 1:
        assert values_digest(tree(one)) != values_digest(tree(other))


@given(states, states)
def test_every_rank_finds_its_own_values_in_a_merge(one: dict, other: dict) -> None:
    trees = {0: tree(one), 1: tree(other)}
    merged, conflicts = merge([([0], trees[0]), ([1], trees[1])])
    for rank, own in trees.items():
        selection = select(merged, rank)
        assert not selection.borrowed
        assert [each for each in compare(own, selection.tree) if each.kind != "unexpected"] == []
    assert not conflicts or select(merged, 9).borrowed


def test_keys_of_some_ranks_are_simply_there() -> None:
    merged, conflicts = merge([([1, 0], tree({"a": 1, "s": {"x": T}})), ([2], tree({"s": {"y": T}, "b": 2}))])
    assert not conflicts
    assert same(built(merged), {"a": 1, "s": {"x": T, "y": T}, "b": 2})


def test_lists_are_joined_by_item_unless_they_are_values() -> None:
    one = tree({"groups": [{"lr": 1, "params": [1, 2]}, T], "pair": (1, 2)})
    other = tree({"groups": [{"lr": 1, "params": [1, 3]}, T], "pair": (1, 3)})
    _, conflicts = merge([([0, 2], one), ([1], other), ([3], one)])
    ranks = ((0, 2, 3), (1,))
    assert conflicts == [Conflict("groups/0/params", ranks), Conflict("pair", ranks)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (0.0, -0.0),
        (T, 1),
        (PerRank(1), 1),
        ([T], [T, T]),
        ({}, OrderedDict()),
        ([1], (1,)),
        (Counting(), {}),
        (deque(maxlen=1), deque(maxlen=2)),
        (Point(T, 1), (T, 1)),
    ],
)
def test_what_differs_is_kept_per_rank(one: Any, other: Any) -> None:
    merged, conflicts = merge([([0, 1], tree({"a": one})), ([5, 3], tree({"a": other}))])
    assert conflicts == [Conflict("a", ((0, 1), (3, 5)))]
    assert select(merged, 1).tree == tree({"a": one})
    assert select(merged, 3).tree == tree({"a": other})
    assert select(merged, 9).tree == tree({"a": one})
    assert (select(merged, 9).borrowed, select(merged, 3).borrowed) == (("a",), ())
    with pytest.raises(ManifestError, match="select"):
        compare(tree({"a": one}), merged)


def test_equal_values_in_other_order_are_no_conflict() -> None:
    merged, conflicts = merge(
        [([1], tree({"a": {"x": 1, "y": [{"p": 1, "q": 2}]}})), ([0], tree({"a": {"y": [{"q": 2, "p": 1}], "x": 1}}))]
    )
    assert not conflicts
    assert list(built(merged)["a"]) == ["x", "y"]


def test_blobs_know_the_lowest_rank_that_holds_them() -> None:
    big, other = {"a": ["x" * 70_000, T]}, {"a": ["y" * 70_000, T]}
    merged, conflicts = merge([([4, 3], tree(big)), ([2], tree(other)), ([7], tree(big))])
    assert conflicts == [Conflict("a/0", ((2,), (3, 4, 7)))]
    assert [select(merged, rank).tree.v[0].v[0].rank for rank in (2, 4, 7)] == [2, 3, 3]
    alone, _ = merge([([8, 6], tree(big))])
    assert alone.v[0].v[0].rank == 6


def test_missing_and_unexpected_list_every_leaf() -> None:
    target = {"a": {"x": T, "empty": {}, "ids": [1, 2], "deep": [{"y": 1}]}, "both": 1}
    assert differences(target, {"both": 2}) == [("missing", name) for name in ("a/x", "a/empty", "a/ids", "a/deep/0/y")]
    assert differences({"both": 1}, target) == [
        ("unexpected", name) for name in ("a/x", "a/empty", "a/ids", "a/deep/0/y")
    ]
    assert differences({"state": {}}, {"state": {"0": {"exp": T}}}) == [("unexpected", "state/0/exp")]


@pytest.mark.parametrize(
    ("target", "saved"),
    [
        ([1], [1, 2]),
        ((1,), [1]),
        ({}, []),
        (T, 1),
        (1, T),
        (T, PerRank(1)),
        (PerRank(1), 1),
        (None, {"x": 1}),
        (Point(1, 2), (1, 2)),
        ([0] * 40_000, [0] * 40_001),
        ([0], [0] * 40_000),
        ((0,) * 40_000, [0] * 40_000),
    ],
)
def test_kinds_and_lengths_must_fit(target: Any, saved: Any) -> None:
    assert differences({"a": target}, {"a": saved}) == [("container", "a")]


@pytest.mark.parametrize(
    ("target", "saved"),
    [
        (1, "x"),
        (None, 2**70),
        ({1}, 2),
        ("", "x" * 70_000),
        ([1], ["x"]),
        (Counting(a=1), {"a": 2}),
        ({"a": 1}, Counting(a=2)),
        (PerRank(1), PerRank({})),
        (Point(1, 2), Point("a", "b")),
    ],
)
def test_any_value_takes_the_place_of_another(target: Any, saved: Any) -> None:
    assert differences({"a": target}, {"a": saved}) == []


def test_the_text_says_what_stands_on_both_sides() -> None:
    texts = [each.text for each in compare(tree({"a": T, "l": [1]}), tree({"a": {}, "l": [1, 2]}))]
    assert texts == [
        "'a': the target has a tensor, the checkpoint a dict",
        "'l': the target has 1 items, the checkpoint 2: an object with state_dict and load_state_dict takes any number",
    ]


def test_many_leaves_take_well_under_a_second_each() -> None:
    state = {"opt": {f"p{i}": {"step": i, "exp_avg": T} for i in range(50_000)}}
    node = tree(state)
    begin = time.perf_counter()
    merge([([0], node)])
    skeleton(node)
    values_digest(node)
    assert time.perf_counter() - begin < 50  # 0.4 s on an idle machine: only what grows with the square takes so long
