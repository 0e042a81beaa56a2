import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_ckpt.errors import ManifestError, UnsupportedTypeError
from hyper_ckpt.state import escape_key, join, parse_key

from ._same import is_array, same, save
from .strategies import keys, states, texts


@given(keys | st.floats() | st.complex_numbers())
def test_a_key_is_read_back_with_its_type(key: object) -> None:
    part = escape_key(key)
    assert "/" not in part
    part.encode()  # no lone surrogate is left
    assert same(parse_key(part), key)


@given(keys, keys)
def test_different_keys_have_different_parts(one: object, other: object) -> None:
    assert (escape_key(one) == escape_key(other)) == same(one, other)


@given(st.lists(keys, min_size=1, max_size=4), st.lists(keys, min_size=1, max_size=4))
def test_different_paths_have_different_names(one: list[object], other: list[object]) -> None:
    def name(path: list[object]) -> str:
        joined: str | None = None
        for key in path:
            joined = join(joined, escape_key(key))
        assert joined is not None
        return joined

    assert (name(one) == name(other)) == same(one, other)


@given(states)
def test_as_many_names_as_tensors(state: dict) -> None:
    def count(value: object) -> int:
        if isinstance(value, dict):
            return sum(map(count, value.values()))
        if isinstance(value, list | tuple) or type(value).__name__ == "deque":
            return sum(map(count, value))  # type: ignore[call-overload]
        return is_array(value)

    assert len(save(state).tensors) == count(state)


@given(texts)
def test_what_is_read_has_one_spelling(text: str) -> None:
    try:
        key = parse_key(text)
    except ManifestError:
        return
    assert escape_key(key) == text


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("", ""),
        ("a/b", "a~1b"),
        ("~", "~0"),
        ("../x", "..~1x"),
        ("\ud800", "~ud800"),
        ("\0\n", "\0\n"),
        ("😀", "😀"),
        ("__metadata__", "__metadata__"),
        ("x" * 3000, "x" * 3000),
        (1, "~i1"),
        ("1", "1"),
        (-1, "~i-1"),
        (2**63, "~i0x8000000000000000"),
        (True, "~true"),
        (None, "~null"),
        (1.0, "~f1.0"),
        (-0.0, "~f-0.0"),
        (float("inf"), "~finf"),
        (float("nan"), "~fnan"),
        (b"\xff", "~xff"),
        (1j, "~c0.0,1.0"),
        ((), "~t(~)"),
        (("",), "~t(~,~)"),
        (("a", (1,)), "~t(a~,~t(~i1~,~)~,~)"),
    ],
)
def test_documented_spellings(key: object, part: str) -> None:
    assert escape_key(key) == part
    assert same(parse_key(part), key)


def test_a_huge_int_key_is_read_back() -> None:
    assert parse_key(escape_key(10**5000)) == 10**5000


@pytest.mark.parametrize(
    "part",
    [
        "~",
        "~2",
        "a/b",
        "~i",
        "~i01",
        "~i1_0",
        "~i0x1",
        "~f1",
        "~f",
        "~x0",
        "~xFF",
        "~t(",
        "~t()",
        "~t(a)",
        "~c1",
        "~u0041",
        "~uD800",
        "~t(a~,",
        "~t(" * 5000,
        "a~,b",
        "~nope",
    ],
)
def test_hostile_parts_are_refused(part: str) -> None:
    with pytest.raises(ManifestError):
        parse_key(part)


@pytest.mark.parametrize("key", [object(), frozenset(), (1, object()), int, bytearray])
def test_other_keys_are_refused_by_path(key: object) -> None:
    with pytest.raises(UnsupportedTypeError, match="'model' has a key of type"):
        save({"model": {key: 1}})


def test_dots_and_nesting_do_not_meet() -> None:
    one = np.zeros(1)
    flat = save({"a.b": one, "a": {"b": one}, 1: one, "1": one, "m": [one, {"0": one}], "": {"": one}})
    assert list(flat.tensors) == ["a.b", "a/b", "~i1", "1", "m/0", "m/1/0", "/"]
