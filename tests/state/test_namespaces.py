"""Namespaces, and classes derived from list and tuple, as containers."""

import time
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt import PerRank
from hyper_ckpt.errors import UnsupportedTypeError
from hyper_ckpt.state import merge, skeleton

from ._same import Counting, load, round_trip, same, save
from .strategies import Point

KINDS = [Namespace, SimpleNamespace]


def made(kind: type, **attributes: Any) -> Any:
    value = kind()
    vars(value).update(attributes)
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_namespaces_come_back(kind: type) -> None:
    value = made(
        kind, lr=0.1, self="x", layers=[1, 2], inner=made(kind, a=None), point=Point(1, 2), **{"not a name": 1}
    )
    found = round_trip(value)
    assert type(found) is kind
    assert vars(found).keys() == vars(value).keys()
    assert type(found.inner) is kind
    assert (found.lr, found.self, found.layers, found.point) == (0.1, "x", [1, 2], Point(1, 2))
    assert type(round_trip([value])[0]) is kind
    assert type(round_trip(PerRank(value)).value) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_namespaces_are_filled_in_place(kind: type) -> None:
    array, loaded = np.ones(2), np.zeros(2)
    saved = save({"args": made(kind, step=3, w=array, inner=made(kind, names=["a"]), gone=1)})
    inner = made(kind, names=["b"])
    target = {"args": made(kind, step=0, w=loaded, inner=inner, own=5)}
    args, names = target["args"], inner.names
    load(target, saved, tensors={})
    assert target["args"] is args
    assert args.step == 3
    assert args.w is loaded
    assert args.inner is inner
    assert inner.names is names
    assert names == ["a"]
    assert args.own == 5
    assert not hasattr(args, "gone")
    assert set(saved.tensors) == {"args/w"}


def test_namespaces_and_dicts_fit_each_other() -> None:
    target = {"args": {"lr": 0.0}}
    load(target, save({"args": Namespace(lr=0.5)}))
    assert target == {"args": {"lr": 0.5}}
    wanted = {"args": SimpleNamespace(lr=0.0)}
    load(wanted, save({"args": {"lr": 0.5}}))
    assert wanted == {"args": SimpleNamespace(lr=0.5)}


def test_ranks_with_other_namespaces_differ() -> None:
    trees = [([rank], save({"a": kind(x=1)}).tree) for rank, kind in enumerate(KINDS)]
    assert [conflict.name for conflict in merge(trees)[1]] == ["a"]
    assert not merge([([0], trees[0][1]), ([1], save({"a": Namespace(x=1)}).tree)])[1]
    assert skeleton(save({"a": Namespace(x=np.ones(1))}).tree) != skeleton(save({"a": {"x": np.ones(1)}}).tree)


def test_what_an_object_holds() -> None:
    first, second = Counting(args=Namespace(a=1, deep=SimpleNamespace(b=[2]))), Counting(args=Namespace(a=0))
    hyper_ckpt.save({"o": first}, "memory://namespaces/objects", overwrite=True)
    hyper_ckpt.load({"o": second}, "memory://namespaces/objects")
    (given,) = second.loaded
    assert given == {"args": Namespace(a=1, deep=SimpleNamespace(b=[2]))}


class Derived(Namespace):
    pass


def test_a_class_derived_from_a_namespace_is_refused() -> None:
    with pytest.raises(UnsupportedTypeError, match="Derived"):
        save({"args": Derived(a=1)})


class Rows(list):
    pass


class Pair(tuple):
    pass


class SlottedRows(list):
    __slots__ = ("note",)


def test_classes_derived_from_list_and_tuple_are_these() -> None:
    assert same(round_trip(Rows([1, 2])), [1, 2])
    assert same(round_trip(Pair((1, Rows([2])))), (1, [2]))
    rows, pair = Rows([0, Pair((0, 0))]), Pair((np.zeros(1), "x"))
    target = {"rows": rows, "pair": pair}
    load(target, save({"rows": Rows([1, (2, 3)]), "pair": (np.ones(1), "y")}), tensors={})
    assert target["rows"] is rows
    assert same(rows, Rows([1, Pair((2, 3))]))
    assert type(target["pair"]) is Pair
    assert target["pair"][0] is pair[0]
    assert target["pair"][1] == "y"


def test_what_else_they_hold_is_not_lost_in_silence() -> None:
    noted, slotted = Rows([1]), SlottedRows([1])
    noted.note = "x"
    for value in (noted, slotted, time.gmtime()):
        with pytest.raises(UnsupportedTypeError, match="cannot be stored"):
            save({"v": value})


def test_a_state_whose_tensors_are_in_namespaces_finds_its_platform(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch")
    hyper_ckpt.save({"args": SimpleNamespace(w=torch.ones(2), lr=0.1)}, tmp_path / "c")
    found = hyper_ckpt.read(tmp_path / "c")["args"]
    assert isinstance(found, SimpleNamespace)
    assert np.array_equal(found.w, np.ones(2))
    hyper_ckpt.load({"args": (args := SimpleNamespace(w=torch.zeros(2), lr=0.0))}, tmp_path / "c")
    assert args.w.sum() == 2
    assert args.lr == 0.1
