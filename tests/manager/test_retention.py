"""Retention: which steps stay."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_ckpt import Retention
from hyper_ckpt.manager.retention import Kept

NOW = 1_000_000.0


def kept(step: int, hours: float = 0.0, pinned: bool = False, **metrics: float | None) -> Kept:
    return Kept(step, NOW - hours * 3600, pinned, metrics)


RUN = [
    kept(10, 5, loss=3.0, acc=0.1),
    kept(20, 4, loss=1.0, acc=0.5),
    kept(30, 3, pinned=True),
    kept(40, 2, loss=1.0, acc=0.7),
    kept(50, 1, loss=2.0, acc=math.nan),
    kept(60, 0, loss=None),
]


@pytest.mark.parametrize(
    ("rules", "steps"),
    [
        ({}, {10, 20, 30, 40, 50, 60}),
        ({"last": 1}, {30, 60}),
        ({"last": 3}, {30, 40, 50, 60}),
        ({"last": 99}, {10, 20, 30, 40, 50, 60}),
        ({"every": 20}, {20, 30, 40, 60}),
        ({"every": 7}, {30, 60}),
        ({"hours": 2}, {30, 40, 50, 60}),
        ({"best": 1}, {30, 40, 60}),  # of equals the later one
        ({"best": 2}, {20, 30, 40, 60}),
        ({"best": 9}, {10, 20, 30, 40, 50, 60}),
        ({"best": 1, "metric": "acc", "mode": "max"}, {30, 40, 60}),
        ({"best": 1, "metric": "acc"}, {10, 30, 60}),
        ({"best": 1, "metric": "absent"}, {10, 20, 30, 40, 50, 60}),  # as long as none has it
        ({"last": 2, "best": 1, "every": 10**9}, {30, 40, 50, 60}),
    ],
)
def test_rules(rules: dict[str, Any], steps: set[int]) -> None:
    assert Retention(**rules).kept(RUN, NOW) == steps


@pytest.mark.parametrize(
    "wrong", [{"last": 0}, {"every": -1}, {"hours": 0}, {"best": 0}, {"mode": "median"}, {"hours": math.nan}]
)
def test_rules_that_cannot_be_meant(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be above 0|mode is"):
        Retention(**wrong)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"last": 2.5}, "last must be an integer, not 2.5; None"),
        ({"best": "2"}, "best must be an integer, not '2'"),
        ({"every": True}, "every must be an integer, not True"),
        ({"hours": "1h"}, "hours must be a number, not '1h'"),
        ({"metric": None}, "metric must be the name of one, not None"),
    ],
)
def test_rules_of_another_type(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Retention(**wrong)


def test_unmeasured() -> None:
    absent = Retention(best=1, metric="absent")
    assert absent.unmeasured(RUN, NOW)
    assert Retention(best=1, last=2, metric="absent").unmeasured(RUN, NOW)
    assert not Retention(best=1, last=6, metric="absent").unmeasured(RUN, NOW), "the other rules keep all anyway"
    assert not absent.unmeasured(RUN[-1:], NOW)
    assert not absent.unmeasured([], NOW)
    assert not Retention(best=1).unmeasured(RUN, NOW)
    assert not Retention(last=1).unmeasured(RUN, NOW)


RUNS = st.lists(
    st.builds(
        kept,
        st.integers(0, 200),
        st.floats(0, 100),
        st.booleans(),
        loss=st.none() | st.floats(allow_nan=True, allow_infinity=True),
    ),
    unique_by=lambda each: each.step,
    max_size=12,
)
RULES = st.fixed_dictionaries(
    {},
    optional={
        "last": st.integers(1, 5),
        "every": st.integers(1, 50),
        "hours": st.floats(0.1, 50),
        "best": st.integers(1, 4),
    },
)


@given(RUNS, RULES, st.sampled_from(["min", "max"]))
def test_a_step_stays_if_any_rule_keeps_it(run: list[Kept], rules: dict[str, Any], mode: Any) -> None:
    found = Retention(**rules, mode=mode).kept(run, NOW)
    steps = {each.step for each in run}
    assert found <= steps
    if not rules:
        assert found == steps
        return
    always = {max(steps)} if steps else set()
    always |= {each.step for each in run if each.pinned}
    alone = [Retention(**{rule: value}, mode=mode).kept(run, NOW) for rule, value in rules.items()]
    assert found == always.union(*alone)


@given(RUNS, st.integers(1, 4), st.sampled_from(["min", "max"]))
def test_no_removed_step_is_better_than_the_best(run: list[Kept], best: int, mode: Any) -> None:
    found = Retention(best=best, mode=mode).kept(run, NOW)
    values = {e.step: e.metrics["loss"] for e in run}
    finite = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
    for step in finite.keys() - found:
        better = [
            s
            for s in found
            if s in finite and (finite[s] <= finite[step] if mode == "min" else finite[s] >= finite[step])
        ]
        assert len(better) >= min(best, len(finite))
