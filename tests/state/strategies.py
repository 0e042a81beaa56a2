"""States that hypothesis draws: every plain type, every container, keys of every kind."""

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from hyper_ckpt.values import PerRank

Point = namedtuple("Point", "x y")

# Surrogates included: hypothesis leaves them out unless told.
texts = st.text(st.characters(), max_size=8) | st.text(st.sampled_from("~/\ud800\udfff.01itfu,)( \0\n"), max_size=6)
floats = st.floats() | st.sampled_from([float("nan"), -float("nan"), float("inf"), -0.0])
ints = st.integers() | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30])

scalar_keys = texts | ints | st.booleans() | st.none() | st.floats(allow_nan=False) | st.binary(max_size=4)
keys = st.recursive(scalar_keys, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)

hashables = scalar_keys | st.fractions().map(Fraction) | st.sampled_from([np.float64(1.5), PurePosixPath("a")])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    ints,
    floats,
    texts,
    st.complex_numbers(),
    st.binary(),
    st.binary().map(bytearray),
    st.builds(range, st.integers(-9, 9), ints),
    st.builds(slice, st.none() | ints, st.none(), ints),
    st.sets(hashables, max_size=4),
    st.frozensets(hashables, max_size=4),
    st.decimals(allow_nan=False).map(Decimal),
    st.datetimes(timezones=st.none() | st.timezones()),
    st.timedeltas(),
    st.dates(),
    st.sampled_from([np.float32("nan"), np.int8(-1), ml_dtypes.bfloat16(2.5), np.str_("x\0"), np.dtype("<f4")]),
)


def arrays() -> st.SearchStrategy[Any]:
    return st.builds(
        lambda dtype, shape: np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape),
        st.sampled_from(["float32", "int64", "uint8"]),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    )


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, dicts = st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda items: defaultdict(list, items)),
        st.dictionaries(keys, st.integers(0, 9), max_size=3).map(Counter),
        lists,
        lists.map(tuple),
        lists.map(lambda items: deque(items, 5)),
        st.builds(Point, inner, inner),
    )


plain = st.recursive(scalars, _containers, max_leaves=8)
values = st.recursive(scalars | arrays() | plain.map(PerRank), _containers, max_leaves=12)
states = st.dictionaries(keys, values, max_size=4)
plain_states = st.dictionaries(keys, plain, max_size=4)
