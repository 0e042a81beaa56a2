"""Groups of named parameters: joined over ranks, and found again by the names."""

from typing import Any

import numpy as np
import pytest

from hyper_ckpt.state import compare, fit_groups, groups_advice, merge, rebuild, select
from hyper_ckpt.state.blobs import BLOB_LIMIT

from ._same import make_array, save

T = np.ones(1)


def groups(*lists: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    return {"optimizer": {"param_groups": [{"params": params, **options} for params, options in lists]}}


def joined(*states: dict[str, Any]) -> tuple[Any, list[str]]:
    """The merged state, as rank 0 reads it, and the names of conflicts."""
    tree, conflicts = merge([((rank,), save(state).tree) for rank, state in enumerate(states)])
    built = rebuild(
        select(tree, 0).tree, tensor=lambda name: T, payload=lambda _: None, blob=lambda *_: b"", make_tensor=make_array
    )
    return built, [each.name for each in conflicts]


def fitted(saved: dict[str, Any], target: dict[str, Any]) -> tuple[Any, list[str]]:
    """What is set in the target, and what does not fit."""
    found = fit_groups(save(saved).tree, save(target).tree)
    built = rebuild(
        found.tree, tensor=lambda name: T, payload=lambda _: None, blob=lambda *_: b"", make_tensor=make_array
    )
    problems = [each.text for each in (*compare(save(target).tree, found.tree), *found.unfit)]
    return built, problems


FAST, SLOW = {"lr": 0.5, "betas": (0.9, 0.99)}, {"lr": 0.1, "betas": (0.9, 0.99)}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([groups((["a"], FAST)), groups((["c", "b"], FAST))], groups((["a", "c", "b"], FAST))),
        (
            [groups((["a"], FAST), (["x"], SLOW)), groups((["b"], FAST), (["y", "z"], SLOW))],
            groups((["a", "b"], FAST), (["x", "y", "z"], SLOW)),
        ),
        # A stage without the first kind of parameters: its only group stands elsewhere than the others' like it.
        (
            [groups((["a"], FAST), (["x"], SLOW)), groups((["y"], SLOW))],
            groups((["a"], FAST), (["y"], SLOW), (["x"], SLOW)),
        ),
        ([groups((["a"], FAST)), groups((["a", "b"], FAST))], groups((["a", "b"], FAST))),
        ([groups((["a"], FAST)), groups(([], FAST))], groups((["a"], FAST))),
    ],
)
def test_ranks_groups_are_joined(states: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert joined(*states) == (expected, [])


@pytest.mark.parametrize(
    ("states", "conflict"),
    [
        # Replicas with other options: each rank's are kept, as of any other value.
        ([groups((["a"], FAST)), groups((["a"], SLOW))], "optimizer/param_groups/0/lr"),
        ([groups((["a"], FAST)), groups((["a", "b"], SLOW))], "optimizer/param_groups/0/params"),
        # Tensors are known by their place.
        (
            [groups((["a"], {"lr": T}), (["x"], {"lr": T})), groups((["y"], {"lr": T, "eps": 1}))],
            "optimizer/param_groups",
        ),
    ],
)
def test_groups_that_contradict_each_other_are_kept_per_rank(states: list[dict[str, Any]], conflict: str) -> None:
    built, conflicts = joined(*states)
    assert conflict in conflicts
    assert ("flatten_optimizer_state_dict" in groups_advice(conflict)) == (not conflict.endswith("lr"))
    assert built == states[0]


def test_tensors_in_groups_that_keep_their_places() -> None:
    built, conflicts = joined(groups((["a"], {"lr": T})), groups((["b"], {"lr": T})))
    assert (built, conflicts) == (groups((["a", "b"], {"lr": T})), [])
    assert fitted(built, groups((["b"], {"lr": T}))) == (groups((["b"], {"lr": T})), [])


def test_numbers_of_an_optimizers_own_state_are_not_joined() -> None:
    own = {"optimizer": {"param_groups": [{"params": [0, 1], "lr": 1}]}}
    more = {"optimizer": {"param_groups": [{"params": [0, 1, 2], "lr": 1}]}}
    assert joined(own, more)[1] == ["optimizer/param_groups/0/params"]
    elsewhere = ({"tags": [{"params": ["a"]}]}, {"tags": [{"params": ["b"]}]})
    assert joined(*elsewhere)[1] == ["tags/0/params"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (groups((["b"], {"lr": 0, "betas": 0})), groups((["b"], FAST))),
        (groups((["y"], {"lr": 0, "betas": 0})), groups((["y"], SLOW))),
        (groups((["x", "y"], {}), (["b", "a"], {})), groups((["x", "y"], SLOW), (["b", "a"], FAST))),
        (groups((["a"], {}), (["b"], {}), ([], {"own": 1})), groups((["a"], FAST), (["b"], FAST), ([], {"own": 1}))),
    ],
)
def test_a_target_gets_the_options_of_its_parameters(target: dict[str, Any], expected: dict[str, Any]) -> None:
    saved = groups((["a", "b"], FAST), (["x"], SLOW), (["y"], SLOW))
    assert fitted(saved, target)[0] == expected


@pytest.mark.parametrize(
    ("saved", "target", "text"),
    [
        (
            groups((["a"], FAST), (["x"], SLOW)),
            groups((["a", "x"], FAST)),
            "groups [0, 1], which have different options",
        ),
        (groups((["a"], FAST)), groups((["a", "new"], FAST)), "'new' is in no group"),
        (groups((["a"], {}), (["b"], {"lr": T})), groups((["b"], {"lr": T})), "in group 1, which holds tensors"),
    ],
)
def test_groups_that_do_not_fit_name_the_way(saved: dict[str, Any], target: dict[str, Any], text: str) -> None:
    _, problems = fitted(saved, target)
    assert len(problems) == 1
    assert text in problems[0]
    assert "flatten_optimizer_state_dict" in problems[0]


def test_lists_of_very_many_names_are_joined_too() -> None:
    """They are larger than what otherwise leaves the tree."""
    names = [[f"layers.{i}.weight-of-stage-{rank}" for i in range(3000)] for rank in range(2)]
    assert len(str(names[0])) > BLOB_LIMIT
    built, conflicts = joined(groups((names[0], FAST)), groups((names[1], FAST)))
    assert (built, conflicts) == (groups((names[0] + names[1], FAST)), [])


def test_states_of_parameters_that_a_target_does_not_have_are_left_to_others() -> None:
    saved = groups((["a", "x/y"], FAST))
    saved["optimizer"]["state"] = {"a": {"step": 1}, "x/y": {"step": 2, "m": T}, "of no parameter": {"z": 3}}
    target = groups((["a"], FAST))
    target["optimizer"]["state"] = {}
    found = fit_groups(save(saved).tree, save(target).tree)
    assert sorted(found.unwanted) == ["optimizer/state/x~1y/m", "optimizer/state/x~1y/step"]
    built = rebuild(
        found.tree, tensor=lambda name: T, payload=lambda _: None, blob=lambda *_: b"", make_tensor=make_array
    )
    assert built["optimizer"]["state"] == {"a": {"step": 1}, "of no parameter": {"z": 3}}
