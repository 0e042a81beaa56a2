"""What is saved comes back: bit for bit, types included."""

import copy
import datetime
import enum
import random
import re
import struct
import time
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.errors import PluginError, UnsupportedStateError, UnsupportedTypeError
from hyper_ckpt.state import BUILTIN, decode_tree, encode_tree
from hyper_ckpt.values import PerRank

from ._same import Counting, rebuilt, round_trip, same, save
from .strategies import Point, states


class Color(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    A = 1
    B = 2


class Typed(NamedTuple):
    x: int
    y: list[int]


class Sub(int):
    pass


def nan(payload: int) -> float:
    return struct.unpack(">d", struct.pack(">Q", payload))[0]


@given(states)
def test_any_state_comes_back(state: dict) -> None:
    assert same(rebuilt(save(state)), state)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        2**63 - 1,
        -(2**63),
        2**63,
        10**5000,
        -(10**5000),
        0.1,
        -0.0,
        float("inf"),
        nan(0x7FF8000000000001),
        nan(0xFFF0000000000123),
        complex(float("nan"), -0.0),
        "",
        "a\ud800",
        "\udc00\ud800",
        "😀\0\n",
        b"",
        b"\0\xff",
        bytearray(b"x"),
        range(0),
        range(9, -(10**30), -2),
        slice(None),
        slice(1, "x", -1),
        set(),
        {1, "1", None, (1, frozenset({2}))},
        frozenset({1.5}),
        (),
        [],
        {},
        deque([1], 3),
        deque(),
        Counter("abca"),
        OrderedDict(b=1, a=2),
        defaultdict(list, {1: [2]}),
        defaultdict(None),
        Point(1, [2]),
        Typed(1, [2]),
        {1: "a", "1": "b", None: 1, b"": 2, (1, ("a",)): 3},
        Path("a/\udcffb"),
        PurePosixPath("/x"),
        PureWindowsPath("c:\\x"),
        Decimal("1.10"),
        Decimal("-0"),
        Decimal("sNaN12"),
        Decimal("1e999999"),
        Fraction(-1, 3),
        uuid.UUID(int=5),
        datetime.date(1, 1, 1),
        datetime.datetime(2024, 1, 1, fold=1),
        datetime.time(1, 2, 3, 4),
        datetime.timedelta(-1, 2, 3),
        datetime.datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
        datetime.timezone.utc,
        datetime.timezone(datetime.timedelta(hours=-3, microseconds=1), "X"),
        Color.RED,
        Level.LOW,
        Mode.A,
        Mode.A | Mode.B,
        Mode(0),
        re.IGNORECASE | re.MULTILINE,
        np.dtype(">i2"),
        np.dtype("M8[25s]"),
        np.dtype(ml_dtypes.float8_e4m3fn),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_values(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip(PerRank([value])), PerRank([value]))


@pytest.mark.parametrize(
    "value",
    [
        *(np.dtype(code).type(1) for code in "?bBhHiIlLefdFD"),
        np.float64(-0.0),
        np.float64(nan(0x7FF0000000000001)),
        np.datetime64("NaT"),
        np.datetime64("2024-01-01T00", "25s"),
        np.timedelta64(-3, "ms"),
        np.datetime64(1, "Y"),
        ml_dtypes.bfloat16(1.5),
        ml_dtypes.float8_e5m2("nan"),
        ml_dtypes.int4(-3),
        ml_dtypes.uint4(9),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numpy_scalars(value: np.generic) -> None:
    assert same(round_trip(value), value)


def test_numpy_scalars_that_bytes_do_not_describe() -> None:
    third = np.longdouble(1) / 3
    assert round_trip(third) == third
    # numpy's own str() and == drop trailing zeros.
    text, data = round_trip(np.str_("a\0")), round_trip(np.bytes_(b"a\0"))
    assert (type(text), str.encode(text)) == (np.str_, b"a\0")
    assert (type(data), bytes(data)) == (np.bytes_, b"a\0")


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpy_generators(name: str) -> None:
    generator = np.random.Generator(getattr(np.random, name)(5))
    generator.integers(0, 9, 3, dtype=np.uint32)  # leaves half a word behind
    again = round_trip(generator)
    assert type(again.bit_generator) is type(generator.bit_generator)
    assert (again.integers(0, 2**32, 999, dtype=np.uint32) == generator.integers(0, 2**32, 999, dtype=np.uint32)).all()
    assert round_trip(generator.bit_generator).random_raw() == generator.bit_generator.random_raw()


def test_generators_with_a_gauss_in_store() -> None:
    state, plain = np.random.RandomState(3), random.Random(3)
    state.standard_normal()
    plain.gauss(0, 1)
    again, plain_again = round_trip(state), round_trip(plain)
    assert (again.standard_normal(5) == state.standard_normal(5)).all()
    assert [plain_again.gauss(0, 1) for _ in range(3)] == [plain.gauss(0, 1) for _ in range(3)]


def test_an_unknown_namedtuple_comes_as_a_new_class_of_its_name() -> None:
    local = namedtuple("local", "a b")
    again, other = round_trip(local(1, 2)), round_trip(local(3, 4))
    assert type(again) is type(other)
    assert (again, type(again).__name__, again._fields) == ((1, 2), "local", ("a", "b"))


def test_tensors_inside_a_per_rank_stand_in_its_payload() -> None:
    flat = save({"rng": PerRank({"state": np.arange(3), "loader": Counting(at=5)})})
    assert not flat.tensors
    assert same(rebuilt(flat)["rng"], PerRank({"state": np.arange(3), "loader": {"at": 5}}))


def test_objects_give_their_state_dict() -> None:
    model = Counting(w=np.ones(2), step=1)
    flat = save({"model": model})
    assert list(flat.tensors) == ["model/w"]
    assert flat.substates["model"].object is model
    assert same(rebuilt(flat), {"model": {"w": np.ones(2), "step": 1}})


def test_large_values_become_blobs() -> None:
    state = {
        "text": "x" * 70_000,
        "list": list(range(100_000)),
        "small": [1],
        "dict": {str(i): i for i in range(20_000)},
        "groups": [{"lr": 0.1, "params": list(range(50_000))}],
        "many": [{"a": "x" * 99}] * 1000,
        "set": set(range(30_000)),
        "with": (np.ones(1), "y" * 70_000),
    }
    flat = save(state)
    assert list(flat.blobs) == ["text", "list", "groups/0/params", "many", "set", "with/1"]
    assert same(rebuilt(flat), state)


def test_shared_containers_are_stored_by_value() -> None:
    shared = [1]
    assert same(rebuilt(save({"a": shared, "b": (shared, shared)})), {"a": [1], "b": ([1], [1])})


def test_sets_have_one_encoding() -> None:
    one, other = {"a", "b", 8, 0}, {0, 8, "b", "a"}
    assert encode_tree(save({"s": one}).tree) == encode_tree(save({"s": other}).tree)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 0,
        Sub(1),
        time.gmtime(),
        int,
        np.float32,
        np.zeros(1, "i4,f4")[0],
        np.dtype("i4,f4"),
        random.SystemRandom(),
        np.random.Generator,
        defaultdict(lambda: 0),
        enum.Enum("Local", "A").A,
        datetime.datetime(2024, 1, 1, tzinfo=type("Z", (datetime.tzinfo,), {"utcoffset": lambda *_: None})()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_by_path(value: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"'a/0'"):
        save({"a": [value]})


@pytest.mark.parametrize("value", [{np.int64}, {Counting()}, {PerRank(1)}, PerRank(PerRank(1))])
def test_what_has_no_place_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match="'a'"):
        save({"a": value})


def test_a_tensor_of_a_platform_that_is_not_there() -> None:
    strange = type("Tensor", (), {"__module__": "torch_npu.of.some.kind"})()
    with pytest.raises(UnsupportedTypeError, match="install hyper-ckpt-torch"):
        save({"a": strange})


def test_the_remedies_are_named() -> None:
    with pytest.raises(UnsupportedTypeError, match=r"codec.*state_dict.*allow_pickle"):
        save({"a": object()})


@pytest.mark.parametrize("state", [[], None])
def test_the_state_must_be_a_dict(state: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match="wrap it"):
        save(state)


def test_cycles_are_refused_by_path() -> None:
    cycle: dict[str, Any] = {"a": [1, {}]}
    cycle["a"][1]["b"] = cycle["a"]
    with pytest.raises(UnsupportedStateError, match="'a/1/b' contains itself"):
        save(cycle)


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: slice(v), lambda v: Point(v, 1)]
)
def test_nesting_is_bounded(wrap: Any) -> None:
    deep: Any = 1
    for _ in range(127):
        deep = wrap(deep)
    assert repr(round_trip(deep)) == repr(deep)
    for _ in range(9_873):
        deep = wrap(deep)
    with pytest.raises(UnsupportedStateError, match="deeper than 128"):
        save({"a": deep})
    while not isinstance(deep, int):  # frees it level by level
        deep = (
            deep.start or deep.stop
            if isinstance(deep, slice)
            else next(iter(deep.values() if isinstance(deep, dict) else deep))
        )


def test_pickles_only_if_allowed_on_both_sides() -> None:
    flat = save({"a": Sub(3)}, allow_pickle=True)
    with pytest.raises(UnsupportedTypeError, match="allow_pickle=True"):
        rebuilt(flat)
    assert type(rebuilt(flat, allow_pickle=True)["a"]) is Sub


def test_a_codec_of_ones_own() -> None:
    codec = Codec("sub", Sub, lambda value: str(int(value)).encode(), lambda data: Sub(data.decode()))
    flat = save({"a": Sub(3)}, codecs=(*BUILTIN, codec))
    assert type(rebuilt(flat, codecs=[codec])["a"]) is Sub
    with pytest.raises(UnsupportedTypeError, match="codec 'sub'"):
        rebuilt(flat)
    with pytest.raises(PluginError, match="two codecs"):
        save({}, codecs=(codec, copy.copy(codec)))


def test_the_tree_is_json_of_the_documented_form() -> None:
    flat = save({"w": np.ones(1), 1: [float("nan"), 2**64], "r": PerRank(0), "t": (b"a", 1.0)})
    assert encode_tree(flat.tree).decode() == (
        '{"!":"dict","k":["w","~i1","r","t"],"v":[{"!":"tensor"},'
        '{"!":"list","v":[{"!":"float","v":"7ff8000000000000"},{"!":"int","v":"10000000000000000"}]},'
        '{"!":"per_rank"},{"!":"tuple","v":[{"!":"bytes","v":"YQ=="},1.0]}]}'
    )
    assert decode_tree(encode_tree(flat.tree)) == flat.tree
