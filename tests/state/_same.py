"""Equality that compares bits and types, and the glue that every test of the state needs."""

import copy
import random
import struct
from collections import defaultdict, deque
from decimal import Decimal
from typing import Any

import numpy as np

from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.state import (
    FlatState,
    RawNode,
    decode_tree,
    encode_tree,
    flatten,
    merge,
    prepare_restore,
    rebuild,
    select,
)
from hyper_ckpt.values import PerRank


def same(a: Any, b: Any) -> bool:
    """Equal in type and bits, all the way down; dicts in order too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        factories = not isinstance(a, defaultdict) or a.default_factory is b.default_factory
        return (
            factories
            and len(a) == len(b)
            and all(same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True))
        )
    if isinstance(a, list | tuple | deque):
        bounds = not isinstance(a, deque) or a.maxlen == b.maxlen
        return bounds and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return sorted(map(repr, a)) == sorted(map(repr, b)) and sorted(map(str, map(type, a))) == sorted(
            map(str, map(type, b))
        )
    return _same_leaf(a, b)


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, float) and type(a) is float:
        return struct.pack(">d", a) == struct.pack(">d", b)
    if type(a) is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, PerRank):
        return same(a.value, b.value)
    if isinstance(a, random.Random):
        return a.getstate() == b.getstate()
    if isinstance(a, Decimal):
        return a.as_tuple() == b.as_tuple()
    return bool(a == b)


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def to_host(value: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return value.dtype.name, value.shape, value.tobytes()


def make_array(node: RawNode) -> np.ndarray:
    return np.frombuffer(node.v, dtype=dtype_of(node.dtype).carrier).reshape(node.shape).copy()


def save(state: dict, **options: Any) -> FlatState:
    return flatten(state, is_tensor=is_array, to_host=to_host, **options)


def through_disk(flat: FlatState) -> Any:
    """The tree as a loading rank 0 has it."""
    merged, conflicts = merge([([0], flat.tree)])
    assert not conflicts
    return select(decode_tree(encode_tree(merged)), 0).tree


def rebuilt(flat: FlatState, **options: Any) -> dict:
    return rebuild(
        through_disk(flat),
        tensor=flat.tensors.__getitem__,
        payload=flat.payloads.get,
        blob=lambda name, node: flat.blobs[name],
        make_tensor=make_array,
        **options,
    )


def load(target: dict, flat: FlatState, tensors: dict | None = None, **options: Any) -> None:
    restore = prepare_restore(
        flatten(target, is_tensor=is_array),
        through_disk(flat),
        payload=flat.payloads.get,
        blob=lambda name, node: flat.blobs[name],
        make_tensor=make_array,
        tensors=flat.tensors if tensors is None else tensors,
        **options,
    )
    restore.run()


def round_trip(value: Any) -> Any:
    return rebuilt(save({"x": value}))["x"]


class Counting:
    """An object with a state_dict that notes what it was given."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.loaded: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(copy.copy(state))
        self.state = dict(state)
