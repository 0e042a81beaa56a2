"""Every name and every value comes back through save, load and read, types included."""

import datetime
import enum
import io
import json
import random
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hyper_ckpt
from hyper_ckpt.dtypes import TABLE, numpy_dtype
from hyper_ckpt.errors import MissingKeyError, UnsupportedStateError, UnsupportedTypeError
from hyper_ckpt.values import PerRank

from .helpers import Point, State, Stateful, blank, copied, fresh, load_on, plain_of, same, save_on

NAMES = [
    "", "a/b", "../x", "/", ".", "..", "a\0b", "\0", "line\nbreak", "\r", "emoji 🎉", "x" * 3000, "\ud800", "a\udfffb",
    "__metadata__", "hyper_ckpt", "format", "manifest.json", "receipts/rank-00000.json", "rank-00000.safetensors",
    "~", "~0", "~1", "~i1", "~ud800", "@0", "a@1", "a.b", "C:\\x", " ", "%00", '"', "\\", "\x7f", "\u2028", "!", "k",
]  # fmt: skip
KEYS = [1, "1", 1.5, True, None, 2.0, b"1", b"", (1, "1"), (), ((),), -1, 2**70, 1j, float("inf")]


class Color(enum.Enum):
    RED = "r"


NAN = struct.unpack(">d", struct.pack(">Q", 0xFFF8000000000123))[0]
VALUES: dict[str, Any] = {
    "none": None, "true": True, "zero": 0, "neg": -1, "i64": [2**63 - 1, -(2**63)],
    "big": [2**63, -(2**63) - 1, 10**400],
    "float": [1.5, -0.0, float("inf"), float("-inf"), float("nan"), NAN, 5e-324],
    "complex": [complex(NAN, -0.0), 1j], "str": ["", "x", "\0", "\ud800", "a\udc80", "🎉", "__metadata__"],
    "bytes": [b"", bytes(range(256)), bytearray(b"x")], "range": range(1, 9, 2), "slice": slice(None, 3),
    "sets": [set(), {1, "1", None}, frozenset({1.5}), frozenset()],
    "numbers": (Decimal("1.10"), Fraction(1, 3)), "uuid": uuid.UUID(int=5), "path": PurePosixPath("a/../b"),
    "times": [datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)],
    "days": [datetime.timedelta(1), datetime.date(1, 1, 1)],
    "numpy": [np.float32("nan"), np.int8(-1), ml_dtypes.bfloat16(2.5), np.dtype("<f4"), np.bool_(True)],
    "enum": Color.RED, "named": Point(1, [2]), "tuple": (1, (2,), ()), "list": [[], [[]]], "empty": {},
    "ordered": OrderedDict([("z", 1), ("a", {})]), "counter": Counter(a=2, b=-1),
    "default": defaultdict(list, {"k": [1]}), "deque": deque([1, 2], 5), "keys": {key: i for i, key in enumerate(KEYS)},
    "object": Stateful(step=3, w=np.arange(3.0), inner={"a": (1,)}), "random": random.Random(3),
    "long": "y" * 70_000, "many": list(range(40_000)), "deep": {"a": [{"b": ("z" * 70_000, 1)}]},
    "per rank": PerRank({"rng": [1, NAN], "a": np.arange(4, dtype="i2"), "big": b"q" * 70_000}),
    "array": np.arange(6, dtype="f4").reshape(2, 3), "0d": np.array(2.5), "none at all": np.zeros((0, 4), "i8"),
}  # fmt: skip


def check_round_trip(state: State, world: int, url: str) -> None:
    kept = copied(state)
    save_on(world, lambda rank: copied(state), url)
    states, reports = load_on(world, lambda rank: blank(state), url, strict="exact")
    assert all(same(each, kept) for each in states), [k for k in kept if not same(states[0][k], kept[k])]
    assert not any(r.missing or r.unexpected or r.mismatched or r.kept for r in reports)
    assert same(hyper_ckpt.read(url), plain_of(kept))
    assert hyper_ckpt.verify(url).ok


@pytest.mark.parametrize("world", [1, 3])
def test_every_value(world: int) -> None:
    check_round_trip(VALUES, world, fresh())


@pytest.mark.parametrize("contents", [b"", b"3\n", bytes(range(256)) * 300])
def test_a_buffer_of_bytes_keeps_its_position(contents: bytes) -> None:
    url, saved = fresh(), io.BytesIO(contents)
    saved.seek(len(contents) // 2)
    hyper_ckpt.save({"buffer": saved}, url)
    target = {"buffer": io.BytesIO(b"another length")}
    hyper_ckpt.load(target, url, strict="exact")
    for found in (target["buffer"], hyper_ckpt.read(url)["buffer"]):
        assert (found.getvalue(), found.tell()) == (contents, len(contents) // 2)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("of", ["tensor", "value", "per rank", "blob", "object", "nested"])
def test_every_name(of: str, world: int, tmp_path: Path) -> None:
    make = {
        "tensor": lambda i: np.full((i % 3, 2), i, "i4"),
        "value": lambda i: i,
        "per rank": lambda i: PerRank([i]),
        "blob": lambda i: f"{i}" * 70_000 if i < 4 else i,
        "object": lambda i: Stateful(step=i, w=np.array(i)),
        "nested": lambda i: {NAMES[-1 - i % 9]: [np.array(i)], NAMES[i % 9]: {}},
    }[of]
    state: State = {name: make(i) for i, name in enumerate([*NAMES, *KEYS])}
    check_round_trip(state, world, str(tmp_path / "ckpt"))
    for name in tmp_path.rglob("*"):
        assert len(name.name) < 100


def test_names_of_tensors_are_those_that_people_know() -> None:
    url = fresh()
    hyper_ckpt.save({"model": {"layers.0.weight": np.ones(2)}, "a/b": np.ones(1), 1: np.ones(1)}, url)
    assert set(hyper_ckpt.read_metadata(url).state_dict_metadata) == {"model/layers.0.weight", "a~1b", "~i1"}


def random_bits(name: str, shape: tuple[int, ...]) -> np.ndarray:
    row = next(r for r in TABLE if r.name == name)
    data = np.random.default_rng(1).integers(0, 256, int(np.prod(shape)) * row.itemsize, np.uint8)
    if name in ("bool", "int4", "uint4"):
        data &= 1
    return data.view(row.carrier).view(numpy_dtype(name)).reshape(shape)


@pytest.mark.parametrize("world", [1, 3])
def test_every_dtype(world: int) -> None:
    state: State = {row.name: random_bits(row.name, (5, 3)) for row in TABLE}
    state |= {f"{row.name} 0d": random_bits(row.name, ()) for row in TABLE}
    state |= {f"{row.name} empty": random_bits(row.name, (2, 0)) for row in TABLE}
    state["held"] = PerRank([random_bits(row.name, (3,)) for row in TABLE])
    check_round_trip(state, world, fresh())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex128", "int4"])
def test_arrays_that_are_not_contiguous(dtype: str) -> None:
    whole = random_bits(dtype, (40, 30))
    views = {
        "transposed": whole.T, "step": whole[::3, ::2], "backwards": whole[::-1, ::-1], "column": whole[:, 3],
        "fortran": np.asfortranarray(whole), "broadcast": np.broadcast_to(whole[0], (4, 30)), "row": whole[2:3],
    }  # fmt: skip
    url = fresh()
    hyper_ckpt.save(views, url)
    assert sum(hyper_ckpt.read_metadata(url).files.values()) < 30_000 * whole.itemsize + 8192
    for names in (set(views), {"step", "column"}):
        memory = {name: np.zeros((300, 300), whole.dtype) for name in names}
        targets = {}
        for name in names:
            a, b = (*views[name].shape, 1)[:2]
            target = memory[name].T[5 : 5 + 2 * a : 2, 7 : 7 + 3 * b : 3]
            targets[name] = target if views[name].ndim == 2 else target[:, 0]
        hyper_ckpt.load(targets, url)
        for name in names:
            assert same(targets[name], views[name])
            rest = memory[name].copy()
            rest.T[5 : 5 + 2 * targets[name].shape[0] : 2, 7 : 7 + 3 * (*views[name].shape, 1)[1] : 3] = 0
            assert not rest.view(np.uint8).any()


def test_large_arrays_that_are_not_contiguous() -> None:
    whole, url = np.arange(3 << 20, dtype="i4").reshape(1536, 2048), fresh()
    state = {"t": whole.T, "s": whole[:, ::2], "b": whole[::-1]}
    save_on(2, lambda rank: state, url)
    target = {
        "t": np.zeros_like(whole).T,
        "s": np.zeros_like(whole)[:, 1::2],
        "b": np.zeros((2048, 1536), "i4").T,
    }
    hyper_ckpt.load(target, url)
    assert all((target[name] == state[name]).all() for name in state)
    hyper_ckpt.save(state, url, overwrite=True, max_host_bytes=1 << 20)
    assert all((value == state[name]).all() for name, value in hyper_ckpt.read(url).items())


def test_views_store_what_they_show() -> None:
    storage, url = np.arange(1 << 20, dtype="f4"), fresh()
    hyper_ckpt.save({"view": storage[5:15], "again": storage[5:15], "other": storage[10:20]}, url)
    metadata = hyper_ckpt.read_metadata(url)
    assert sum(where.length for rows in metadata.storage_data.values() for _, where in rows) == 120
    (size,) = metadata.files.values()
    assert size == 4096 + 80
    assert same(hyper_ckpt.read(url)["other"], storage[10:20].copy())


@pytest.mark.parametrize("value", [None, 1, {"a": [1, (2.5, NAN)], 3: b"x"}, "\ud800", [], OrderedDict(a=1)])
def test_user_metadata(value: Any) -> None:
    url = fresh()
    rows = save_on(2, lambda rank: {"w": np.ones(2)}, url, user_metadata=value)
    assert all(same(row.user_metadata, value) for row in [*rows, hyper_ckpt.read_metadata(url)])


def test_user_metadata_is_plain_and_small() -> None:
    for value in ("x" * 70_000, np.ones(2), PerRank(1)):
        with pytest.raises(UnsupportedTypeError, match="user"):
            hyper_ckpt.save({}, fresh(), user_metadata=value)


def test_states_without_tensors_or_without_anything() -> None:
    for state in ({}, {"a": 1}, {"a": {}}, {"e": np.zeros((0,), "f4")}, {"p": PerRank(1)}, {"b": "x" * 70_000}):
        for world in (1, 3):
            check_round_trip(state, world, fresh())


def test_the_manifest_holds_no_bare_nan(tmp_path: Path) -> None:
    hyper_ckpt.save({"x": [float("nan"), float("inf")]}, tmp_path / "c")

    def refuse(text: str) -> None:
        raise AssertionError(text)

    json.loads((tmp_path / "c" / "manifest.json").read_text(), parse_constant=refuse)


class Unknown:
    pass


@pytest.mark.parametrize(
    "value", [Unknown(), print, np.array(["x"]), np.array([None]), np.ma.masked_array([1]), np.zeros(2, ">f4"), int]
)
def test_what_cannot_be_stored_is_named_and_nothing_is_written(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="'model/x/1'"):
        hyper_ckpt.save({"model": {"x": [1, value]}}, tmp_path / "c")
    assert not list(tmp_path.rglob("*.*"))


def test_keys_may_be_patterns() -> None:
    url = fresh()
    model = {f"layers.{i}.{kind}": np.full(4, i, "f4") for i in range(3) for kind in ("weight", "bias")}
    hyper_ckpt.save({"model": model, "a*b": 1, "axb": 2, "step": 3}, url, no_dist=True)
    found = hyper_ckpt.read(url, keys=["model/layers.0.*", "model/*.1.bias"])
    assert sorted(found["model"]) == ["layers.0.bias", "layers.0.weight", "layers.1.bias"]
    assert hyper_ckpt.read(url, keys=["a*b"]) == {"a*b": 1}, "a name that is there means itself"
    assert hyper_ckpt.read(url, keys=["ste[p]"]) == {"step": 3}
    with pytest.raises(MissingKeyError, match=r"'layers\.\*'"):
        hyper_ckpt.read(url, keys=["layers.*"])


class ArrayAsState:
    """Its state is an array, not a dict."""

    def __init__(self, value: float) -> None:
        self.value = np.full(3, value)

    def state_dict(self) -> np.ndarray:
        return self.value.copy()

    def load_state_dict(self, state: np.ndarray) -> None:
        self.value = state.copy()


@pytest.mark.parametrize(
    "around", [lambda o: {"x": o}, lambda o: [o], lambda o: {"x": o, "s": 1}, lambda o: (o, o.value)]
)
def test_an_object_whose_state_is_a_tensor_is_given_it(tmp_path: Path, around: Any) -> None:
    hyper_ckpt.save({"d": around(ArrayAsState(1.0))}, tmp_path / "c", no_dist=True)
    target = ArrayAsState(0.0)
    hyper_ckpt.load({"d": around(target)}, tmp_path / "c", no_dist=True)
    assert target.value.tolist() == [1.0] * 3
