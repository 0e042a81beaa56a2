"""Mappings of any class as containers: saved as dicts, loaded into whatever the target has."""

from collections import ChainMap, UserDict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.errors import MissingKeyError, TargetError, UnsupportedStateError
from hyper_ckpt.values import PerRank

from .helpers import Stateful, fresh, load_on, save_on


class Own(dict):
    """A subclass, as many libraries have one."""


class Frozen(Mapping):
    """Another immutable one."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self._items = items

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


MUTABLE = [Own, UserDict, lambda items: ChainMap(items)]
IMMUTABLE = [MappingProxyType, Frozen]


def inner(fill: int) -> dict[Any, Any]:
    return {"w": np.full(3, fill), "list": [fill, {"deep": fill}], 7: PerRank(fill)}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", [*MUTABLE, *IMMUTABLE])
def test_saved_as_dicts_and_filled_in_place(kind: Any, world: int) -> None:
    url = fresh()
    save_on(world, lambda rank: kind({"model": kind(inner(5)), "other": {"m": kind(inner(6))}}), url)
    found = hyper_ckpt.read(url)
    assert type(found) is type(found["model"]) is dict
    assert found["model"]["list"] == [5, {"deep": 5}]
    targets = [kind({"model": kind(inner(0)), "other": {"m": kind(inner(0))}}) for _ in range(world)]
    maps = [(each["model"], each["other"]["m"]) for each in targets]
    load_on(world, targets.__getitem__, url, strict="exact")
    for target, (model, other) in zip(targets, maps, strict=True):
        assert target["model"] is model
        for each, fill in ((model, 5), (other, 6)):
            assert each["w"].tolist() == [fill] * 3
            assert each["list"] == [fill, {"deep": fill}]
            assert each[7].value == fill


@pytest.mark.parametrize("kind", MUTABLE)
def test_plain_values_are_set_in_mutable_ones(kind: Any) -> None:
    url = fresh()
    hyper_ckpt.save({"step": 3, "pair": (1, 2)}, url)
    target = kind({"step": 0, "pair": (0, 0)})
    hyper_ckpt.load(target, url)
    assert dict(target) == {"step": 3, "pair": (1, 2)}


@pytest.mark.parametrize("kind", IMMUTABLE)
def test_what_cannot_be_set_is_refused_before_anything_changes(kind: Any) -> None:
    url = fresh()
    hyper_ckpt.save({"a": {"w": np.ones(2), "step": 3, "nan": float("nan")}}, url)
    target = {"a": kind({"w": np.zeros(2), "step": 0, "nan": float("nan")})}
    with pytest.raises(TargetError, match=r"'a' is a \w+, which cannot be changed, and 'step'"):
        hyper_ckpt.load(target, url)
    assert not target["a"]["w"].any()
    same = {"a": kind({"w": np.zeros(2), "step": 3, "nan": float("nan")})}
    hyper_ckpt.load(same, url)
    assert same["a"]["w"].all()
    with pytest.raises(MissingKeyError):
        hyper_ckpt.load({"a": kind({"x": 1})}, url)


def test_inside_of_objects_and_payloads() -> None:
    url = fresh()
    hyper_ckpt.save({"o": Stateful(d=Own(x=1, w=np.ones(2))), "r": PerRank(UserDict(y=2))}, url)
    target = {"o": Stateful(d=UserDict(x=0, w=np.zeros(2))), "r": PerRank(None)}
    hyper_ckpt.load(target, url)
    assert target["o"].state["d"]["x"] == 1
    assert target["o"].state["d"]["w"].all()
    assert target["r"].value == {"y": 2}


def test_cycles_and_sets() -> None:
    cycle = Own()
    cycle["self"] = cycle
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        hyper_ckpt.save({"c": cycle}, fresh())

    class Hashed(Frozen):
        def __hash__(self) -> int:
            return 1

    with pytest.raises(UnsupportedStateError, match="a mapping in a set"):
        hyper_ckpt.save({"s": {Hashed({"a": 1})}}, fresh())


def test_what_is_no_mapping_is_no_state() -> None:
    with pytest.raises(UnsupportedStateError, match="must be a dict"):
        hyper_ckpt.save([("a", 1)], fresh())  # type: ignore[arg-type]
