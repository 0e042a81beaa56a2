"""A load into a target: values are set where they stand, and nothing is half done."""

import copy
import random
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.errors import DigestError, ManifestError, TargetError
from hyper_ckpt.state import BUILTIN, compare, encode_tree, flatten, prepare_restore
from hyper_ckpt.values import PerRank

from ._same import Counting, is_array, load, make_array, same, save, through_disk
from .strategies import Point, states


def scrambled(value: Any) -> Any:
    """The same containers with other plain values; tensors and sets' kinds stay."""
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = scrambled(item)
        return made
    if isinstance(value, deque):
        return deque(map(scrambled, value), value.maxlen)
    if isinstance(value, list | tuple):
        items = map(scrambled, value)
        return Point(*items) if isinstance(value, Point) else type(value)(items)
    if isinstance(value, PerRank):
        return PerRank("other")
    return value if is_array(value) else f"not {type(value)}"


@given(states)
def test_a_load_gives_what_was_saved(state: dict) -> None:
    flat = save(state)
    target = scrambled(state)
    assert not compare(flatten(target, is_tensor=is_array).tree, through_disk(flat))
    load(target, flat)
    assert same(target, state)


def test_mutable_containers_stay_the_ones_they_were() -> None:
    inner: dict[str, Any] = {
        "list": [0, {"x": 0}],
        "deque": deque([0], 4),
        "counter": Counter(a=9),
        "odict": OrderedDict(a=0),
        "set": {1},
        "bytes": bytearray(b"zz"),
        "per_rank": PerRank(0),
        "tuple": (0, [0]),
        "scalar": 0,
    }
    before = dict(inner)
    saved = {
        "list": [1, {"x": 2}],
        "deque": deque([3], 4),
        "counter": Counter(a=5),
        "odict": OrderedDict(a=6),
        "set": {7, 8},
        "bytes": bytearray(b"y"),
        "per_rank": PerRank([9]),
        "tuple": (1, [2]),
        "scalar": "s",
    }
    target = {"inner": inner}
    load(target, save({"inner": saved}))
    assert same(target, {"inner": saved})
    assert target["inner"] is inner
    kept = [key for key in inner if inner[key] is before[key]]
    assert kept == ["list", "deque", "counter", "odict", "set", "bytes", "per_rank"]
    assert inner["list"][1] is before["list"][1]
    assert inner["tuple"][1] is before["tuple"][1]  # the list inside a rebuilt tuple


def test_what_is_not_saved_or_does_not_fit_stays() -> None:
    target = {
        "own": 1,
        "list": [1, 2],
        "tensor": np.ones(1),
        "plain": 3,
        "kind": {"a": 1},
        "rank": PerRank(1),
        "d": {"y": 1},
    }
    expected = copy.deepcopy(target)
    saved = {
        "list": [1],
        "tensor": 5,
        "plain": np.ones(1),
        "kind": [2],
        "rank": 4,
        "d": {"x": 1},
        "new": 1,
    }
    load(target, save(saved), tensors={"tensor": np.zeros(1)})
    assert same(target, expected)


def test_tensors_are_replaced_by_name() -> None:
    target = {"w": np.zeros(1), "t": (np.zeros(2), 0)}
    new = {"w": np.ones(1), "t/0": np.ones(2)}
    load(target, save({"w": np.zeros(1), "t": (np.zeros(2), 7)}), tensors=new)
    assert target["w"] is new["w"]
    assert target["t"][0] is new["t/0"]
    assert target["t"][1] == 7


def test_an_object_gets_its_state_once_inner_ones_first() -> None:
    order: list[str] = []

    class Named(Counting):
        def load_state_dict(self, state: Any) -> None:
            order.append(state["name"])
            super().load_state_dict(state)

    def made(step: int) -> Named:
        return Named(name="outer", inner=Named(name="inner", step=step), w=np.ones(1), step=step)

    target = made(0)
    load({"m": target}, save({"m": made(5)}))
    assert order == ["inner", "outer"]
    assert (target.state["step"], target.state["inner"].state["step"]) == (5, 5)
    assert len(target.loaded) == 1


def test_objects_and_plain_dicts_load_into_each_other() -> None:
    model = Counting(step=0)
    load({"m": model}, save({"m": {"step": 3}}))
    assert model.state == {"step": 3}
    target = {"m": {"step": 0}}
    load(target, save({"m": Counting(step=4)}))
    assert target == {"m": {"step": 4}}


def test_an_object_in_a_per_rank_is_told_of_its_state() -> None:
    loader, rng = Counting(at=0, order=[]), np.random.default_rng(0)
    saved_rng = np.random.default_rng(7)
    expected = copy.deepcopy(saved_rng).random(3)
    target = {"r": PerRank([loader, rng, 0, np.zeros(1)])}
    load(target, save({"r": PerRank([Counting(at=5, order=[1]), saved_rng, 1, np.ones(1)])}))
    assert target["r"].value[0] is loader
    assert loader.state == {"at": 5, "order": [1]}
    assert target["r"].value[1] is rng
    assert (rng.random(3) == expected).all()
    assert same(target["r"].value[2:], [1, np.ones(1)])


def test_a_rank_without_a_payload_keeps_its_own() -> None:
    flat = save({"r": PerRank(1), "x": 1})
    target = {"r": PerRank("own"), "x": 0}
    flat.payloads.clear()
    load(target, flat)
    assert (target["r"].value, target["x"]) == ("own", 1)


@pytest.mark.parametrize(
    ("own", "saved"),
    [
        (random.Random(1), random.Random(2)),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (np.random.RandomState(1), np.random.RandomState(2)),
        (np.random.default_rng(1), np.random.Generator(np.random.Philox(3))),
    ],
)
def test_generators_are_set_in_place(own: Any, saved: Any) -> None:
    target = {"rng": (own,)}
    flat = save({"rng": (saved,)})
    load(target, flat)
    assert target["rng"][0] is own
    draw = [each.random() for each in (own, saved)]
    assert draw[0] == draw[1]


def test_a_large_list_keeps_its_identity() -> None:
    target = {"ids": [0] * 50_000}
    ids = target["ids"]
    load(target, save({"ids": list(range(50_000))}))
    assert target["ids"] is ids
    assert ids == list(range(50_000))


def test_one_container_in_two_places_is_set_apart_where_it_was_saved_apart() -> None:
    shared: list[Any] = [0, {"x": 0}]
    target = {"a": shared, "b": shared, "c": (shared,), "d": shared}
    load(target, save({"a": [1, {"x": 1}], "b": [2, {"x": 2}], "c": ([3, {"x": 1}],), "d": [1, {"x": 1}]}))
    assert target == {"a": [1, {"x": 1}], "b": [2, {"x": 2}], "c": ([3, {"x": 1}],), "d": [1, {"x": 1}]}
    assert target["a"] is target["d"] is shared
    names = {1, 2}
    sets = {"a": names, "b": names}
    load(sets, save({"a": {3}, "b": {4}}))
    assert sets == {"a": {3}, "b": {4}}
    assert sets["a"] is names


def test_one_generator_cannot_take_two_states() -> None:
    rng = np.random.default_rng(0)
    before = str(rng.bit_generator.state)
    two = save({"a": np.random.default_rng(1), "b": np.random.default_rng(2)})
    with pytest.raises(TargetError, match=r"'a' and 'b' are one Generator"):
        load({"a": rng, "b": rng}, two)
    assert str(rng.bit_generator.state) == before


def test_nothing_is_changed_if_anything_cannot_be_decoded() -> None:
    bad = Codec("bad", Point, lambda value: b"", lambda data: 1 // 0)
    model, target = Counting(step=0), {"a": 0, "l": [0], "s": {1}, "r": PerRank(0), "z": 0}
    target["m"] = model
    saved = {"a": 1, "l": [1], "s": {2}, "r": PerRank(1), "m": Counting(step=1), "z": Point(1, 2)}
    before = copy.copy(target)
    with pytest.raises(ManifestError, match=r"'z'.*'bad'.*ZeroDivision"):
        load(target, save(saved, codecs=(*BUILTIN, bad)), codecs=(*BUILTIN, bad))
    assert target == before
    assert (target["l"], target["s"], target["r"].value, model.loaded) == ([0], {1}, 0, [])


@pytest.mark.parametrize("data", [b"", b'"' + b"y" * 70_000 + b'"', b'["x"]'])
def test_a_blob_of_other_bytes_is_refused(data: bytes) -> None:
    flat = save({"text": "x" * 70_000})
    flat.blobs["text"] = data
    with pytest.raises(DigestError, match="'text'"):
        load({"text": ""}, flat)


def test_the_saved_state_must_be_a_dict() -> None:
    flat = flatten({}, is_tensor=is_array)
    unused: Any = None
    with pytest.raises(ManifestError):
        prepare_restore(flat, 1, payload=unused, blob=unused, make_tensor=make_array, tensors={})
    assert encode_tree(flat.tree) == b'{"!":"dict","k":[],"v":[]}'
