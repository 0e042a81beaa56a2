"""map_keys: a target whose names differ from the saved ones."""

import uuid
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import LoadOptions, PerRank, ShardedTensor, key_maps
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.errors import MissingKeyError, UnexpectedKeyError
from hyper_ckpt.options import KeyMap

from .helpers import State, Stateful, fresh, load_on, on_ranks, same, save_on

W, B = np.arange(12, dtype="f4").reshape(4, 3), np.arange(3, dtype="f4")


def saved() -> State:
    return {
        "model": OrderedDict(
            {"fc.weight": W, "fc.bias": B, "norm.weight": B + 1, "a": np.full(2, 1), "b": np.full(2, 2)}
        ),
        "step": 7,
        "text": "long " * 20_000,
        "mine": PerRank("x"),
        "list": [1, [2]],
    }


def loaded(target: State, map_keys: KeyMap, **options: Any) -> hyper_ckpt.LoadReport:
    url = fresh()
    hyper_ckpt.save(saved(), url, no_dist=True)
    return hyper_ckpt.load(target, url, no_dist=True, options=LoadOptions(map_keys=map_keys), **options)


def zeros(*names: str) -> dict[str, Any]:
    shapes = {"W": (4, 3), "B": (3,)}
    return {name: np.zeros(shapes[kind], "f4") for name, kind in (n.split(":") for n in names)}


def test_a_dict_and_a_report() -> None:
    target: State = {"net": zeros("linear.w:W", "fc.bias:B"), "count": 0, "step": 0}
    names = {"net/linear.w": "model/fc.weight", "net/fc.bias": "model/fc.bias", "count": "step", "other": "text"}
    report = loaded(target, names, strict=False)
    assert same(target, {"net": {"linear.w": W, "fc.bias": B}, "count": 7, "step": 7})
    del names["other"]
    assert report.mapped == names
    assert set(report.loaded) == {"net/linear.w", "net/fc.bias"}
    assert "model/norm.weight" in report.unexpected
    assert "model/fc.weight" not in report.unexpected


def test_a_function_with_candidates_and_strictness() -> None:
    target = {"model": OrderedDict(zeros("fc.kernel:W", "fc.bias:B", "norm.gamma:B"))}

    def find(name: str) -> list[str]:
        return [name.replace("kernel", "filter"), name.replace("kernel", "weight").replace("gamma", "weight")]

    with pytest.warns(UserWarning, match="2 saved values were not loaded.*'model/a'"):
        loaded(target, find)
    assert same(target["model"]["norm.gamma"], B + 1)
    with pytest.raises(MissingKeyError, match=r"'model/fc\.kernel'"):
        loaded(target, lambda name: None)
    with pytest.raises(UnexpectedKeyError, match="'model/a'"):
        loaded(target, find, strict="exact")


def test_names_can_change_places_and_be_used_twice() -> None:
    target: State = {"model": OrderedDict({"a": np.zeros(2, int), "b": np.zeros(2, int), "c": np.zeros(2, int)})}
    report = loaded(target, {"model/a": "model/b", "model/b": "model/a", "model/c": "model/a"}, strict=False)
    assert [target["model"][k].tolist() for k in "abc"] == [[2, 2], [1, 1], [1, 1]]
    assert not {"model/a", "model/b"} & set(report.unexpected)


def test_what_another_leaf_hides_is_reported() -> None:
    target: State = {"model": OrderedDict({"a": np.zeros(2, int)})}
    report = loaded(target, {"model/a": "model/b"}, strict=False)
    assert target["model"]["a"].tolist() == [2, 2]
    assert "model/a" in report.unexpected


def test_values_of_every_kind_move() -> None:
    target: State = {"nested": {"deep": {"note": "", "own": PerRank(None), "obj": Stateful(count=0)}}}
    names = {"nested/deep/note": "text", "nested/deep/own": "mine", "nested/deep/obj/count": "step"}
    report = loaded(target, names, strict=False)
    deep = target["nested"]["deep"]
    assert (deep["note"], deep["own"].value, deep["obj"].state) == ("long " * 20_000, "x", {"count": 7})
    assert report.mapped == names


def test_tensors_of_all_ranks_are_read_once_if_all_map_alike() -> None:
    url = fresh()
    save_on(2, lambda rank: {"m": {"w": ShardedTensor([(W[2 * rank : 2 * rank + 2], (2 * rank, 0))], W.shape)}}, url)

    def target(_: int) -> State:
        return {"n": {"v": np.zeros_like(W)}}

    states, reports = load_on(3, target, url, options=LoadOptions(map_keys={"n/v": "m/w"}))
    assert all(same(state, {"n": {"v": W}}) for state in states)
    assert sum(r.bytes_read for r in reports) == W.nbytes


def test_ranks_that_map_differently_each_get_their_own() -> None:
    """Were the reads shared, rank 1 would get what rank 0 read under the same name."""
    url = f"memory://tests/{uuid.uuid4().hex}"
    hyper_ckpt.save({"one": np.full((400, 400), 1.0), "two": np.full((400, 400), 2.0)}, url, no_dist=True)

    def job(platform: Platform, rank: int) -> float:
        target = {"x": np.zeros((400, 400))}
        options = LoadOptions(map_keys={"x": ("one", "two")[rank]})
        hyper_ckpt.load(target, url, platform=platform, timeout=30, options=options, strict=False)
        assert (target["x"] == target["x"][0, 0]).all()
        return float(target["x"][0, 0])

    assert on_ranks(2, job) == [1.0, 2.0]


TORCH = ["fc.weight", "fc.bias", "norm.weight", "norm.bias", "bn.running_mean", "bn.running_var", "emb.weight"]
MINDSPORE = [
    "fc.weight",
    "fc.bias",
    "norm.gamma",
    "norm.beta",
    "bn.moving_mean",
    "bn.moving_variance",
    "emb.embedding_table",
]


def test_ready_maps_for_layers() -> None:
    to_torch, to_mindspore = key_maps.from_torch({"net": "model"}), key_maps.from_mindspore({"model": "net"})
    for torch_name, ms_name in zip(TORCH, MINDSPORE, strict=True):
        assert f"model/{torch_name}" in to_torch(f"net/{ms_name}")
        assert f"net/{ms_name}" in to_mindspore(f"model/{torch_name}")
    assert key_maps.from_torch()("norm.gamma") == ["norm.gamma", "norm.weight"], "a flat state has no first key"


@pytest.mark.parametrize(
    ("ms_name", "torch_name"),
    [
        ("moment1.norm.gamma", "state/norm.weight/exp_avg"),
        ("adam_v.fc.bias", "state/fc.bias/exp_avg_sq"),
        ("exp_avg.emb.embedding_table", "state/emb.weight/exp_avg"),
        ("moments.fc.weight", "state/fc.weight/momentum_buffer"),
    ],
)
def test_ready_maps_for_optimizers(ms_name: str, torch_name: str) -> None:
    assert f"optimizer/{torch_name}" in key_maps.from_torch()(f"optimizer/{ms_name}")
    assert f"optimizer/{ms_name}" in key_maps.from_mindspore()(f"optimizer/{torch_name}")


@pytest.mark.parametrize("names", [{"step": "nope"}, lambda name: {"step": "nope"}.get(name), {"step": "model/nope"}])
def test_a_name_that_was_not_saved_is_missing_and_not_taken_for_the_own_one(names: KeyMap) -> None:
    with pytest.raises(MissingKeyError, match=r"'step'.*map_keys looks for '(model/)?nope'"):
        loaded({"step": 0}, names)
    target = {"step": 0}
    report = loaded(target, names, strict=False)
    assert (target, report.missing) == ({"step": 0}, ("step",))


def test_names_in_lists_are_mapped_too() -> None:
    target: State = {"list": [0, [0]], "new": [np.zeros((4, 3), "f4"), 0]}
    names = {"list/1/0": "step", "new/0": "model/fc.weight", "new/1": "step"}
    report = loaded(target, names, strict=False)
    assert same(target, {"list": [1, [7]], "new": [W, 7]})
    assert report.mapped == names
    with pytest.raises(MissingKeyError, match="cannot be loaded without it"):
        loaded({"list": [0, [0]]}, {"list/0": "nope"}, strict=False)


@pytest.mark.parametrize("names", [lambda name: b"a", lambda name: [5], {"step": 5}])
def test_what_is_no_name_is_refused(names: Any) -> None:
    with pytest.raises(ValueError, match="must be a name"):
        loaded({"step": 0}, names)
    with pytest.raises(ValueError, match="dict or a function"):
        LoadOptions(map_keys=5)  # type: ignore[arg-type]
