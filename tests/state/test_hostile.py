"""Bytes that nobody saved: refused, or read as a state, but never anything else."""

import contextlib
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_ckpt.errors import CorruptCheckpointError, ManifestError, UnsupportedTypeError
from hyper_ckpt.state import BUILTIN, compare, decode_tree, encode_tree, merge, rebuild, select, skeleton, values_digest

from ._same import make_array, save
from .strategies import states

TAGS = [
    "tensor",
    "per_rank",
    "raw",
    "blob",
    "stateful",
    "ranks",
    "dict",
    "odict",
    "counter",
    "defaultdict",
    "list",
    "tuple",
    "deque",
    "namedtuple",
    "namespace",
    "parts",
    "set",
    "frozenset",
    "range",
    "slice",
    "int",
    "float",
    "complex",
    "bytes",
    "bytearray",
    "str",
    "enum",
    "codec",
    "pickle",
    "nope",
]
FIELDS = [
    "!",
    "k",
    "v",
    "maxlen",
    "factory",
    "module",
    "name",
    "fields",
    "of",
    "kind",
    "context",
    "member",
    "size",
    "digest",
    "rank",
    "dtype",
    "shape",
]

words = st.sampled_from(
    [*TAGS, *(codec.name for codec in BUILTIN), "os", "enum", "x", "~i1", "~t(", "0f", "-1", "YQ==", "float32", ""]
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4).flatmap(
            lambda items: st.sampled_from(TAGS).map(lambda tag: {**items, "!": tag})
        )
    ),
    max_leaves=12,
)


def use(data: bytes, payload: bytes) -> None:
    """All that is done with a tree that was read."""
    tree = select(decode_tree(data), 0).tree
    skeleton(tree)
    values_digest(tree)
    merge([([0], tree), ([1], save({"a": [1]}).tree)])
    compare(tree, tree)
    compare(save({"a": [1]}).tree, tree)
    rebuild(
        tree,
        tensor=lambda name: np.zeros(1),
        payload=lambda name: payload,
        blob=lambda name, node: payload,
        make_tensor=make_array,
    )


def survives(data: bytes, payload: bytes = b"{}") -> None:
    with contextlib.suppress(CorruptCheckpointError, UnsupportedTypeError):
        use(data, payload)


@given(junk)
def test_any_json(value: Any) -> None:
    data = msgspec.json.encode(value)
    survives(data)
    survives(b'{"!":"dict","k":["a","r"],"v":[' + data + b',{"!":"per_rank"}]}', data)


@given(states, st.data())
def test_damaged_trees(state: dict, data: st.DataObject) -> None:
    good = bytearray(encode_tree(save(state).tree))
    position = data.draw(st.integers(0, len(good) - 1))
    good[position] = data.draw(st.integers(0, 255))
    survives(bytes(good))
    survives(bytes(good[:position]))


@given(st.sampled_from([codec.name for codec in BUILTIN]), st.binary(max_size=40) | junk.map(msgspec.json.encode))
def test_any_codec_bytes(name: str, data: bytes) -> None:
    node = msgspec.json.encode({"!": "codec", "name": name, "v": data})
    survives(b'{"!":"dict","k":["a"],"v":[' + node + b"]}")


@pytest.mark.parametrize(
    "wrap",
    [
        '{"!":"list","v":[%s]}',
        '{"!":"dict","k":["a"],"v":[%s]}',
        '{"!":"slice","v":[%s,1,1]}',
        '{"!":"stateful","v":%s}',
        '{"!":"set","v":[%s]}',
        '{"!":"ranks","v":[[[0],%s]]}',
    ],
)
@pytest.mark.parametrize("depth", [130, 100_000])
def test_depth_is_bounded(wrap: str, depth: int) -> None:
    before, after = wrap.split("%s")
    with pytest.raises(ManifestError):
        decode_tree((before * depth + "1" + after * depth).encode())


@pytest.mark.parametrize(
    "node",
    [
        '{"!":"dict","k":["a"],"v":[]}',
        '{"!":"dict","k":["a","a"],"v":[1,2]}',
        '{"!":"dict","k":["a/b"],"v":[1]}',
        '{"!":"dict","k":[1],"v":[1]}',
        '{"!":"namedtuple","v":[1],"module":"m","name":"N","fields":[]}',
        '{"!":"namedtuple","v":[1,2],"module":"m","name":"N","fields":["a","a"]}',
        '{"!":"deque","v":[1,2],"maxlen":1}',
        '{"!":"range","v":[1,2]}',
        '{"!":"int","v":"0x1"}',
        '{"!":"int","v":"1_0"}',
        '{"!":"float","v":"00"}',
        '{"!":"str","v":"0"}',
        '{"!":"bytes","v":"?"}',
        '{"!":"defaultdict","k":[],"v":[],"factory":"eval"}',
        '{"!":"namespace","k":["a"],"v":[1],"of":"os"}',
        '{"!":"namespace","k":["a"],"v":[1,2],"of":"types"}',
        '{"!":"parts","k":["a"],"v":[{"!":"tensor"}],"kind":"x.Y"}',
        '{"!":"parts","k":["a"],"v":[],"kind":"x.Y","context":null}',
        '{"!":"parts","k":[],"v":[],"kind":"x.Y","context":{"!":"tensor"}}',
        '{"!":"parts","k":[],"v":[],"kind":"x.Y","context":{"!":"list","v":[{"!":"per_rank"}]}}',
        '{"!":"parts","k":[],"v":[],"kind":"x.Y","context":{"!":"ranks","v":[[[0],1]]}}',
        '{"!":"parts","k":[],"v":[],"kind":"x.Y","context":{"!":"raw","dtype":"uint8","shape":[1],"v":"YQ=="}}',
        '{"!":"parts","k":[],"v":[],"kind":"x.Y","context":{"!":"stateful","v":1}}',
        '{"!":"ranks","v":[]}',
        '{"!":"ranks","v":[[[],1]]}',
        '{"!":"ranks","v":[[[0],1],[[0],2]]}',
        '{"!":"ranks","v":[[[-1],1]]}',
        '{"!":"ranks","v":[[[0],{"!":"ranks","v":[[[0],1]]}]]}',
        '{"!":"tensor","rank":0}',
        '{"!":"dict","k":["a"],"v":[{"!":"tensor","rank":0}]}',
        '{"!":"set","v":[{"!":"tensor","rank":0}]}',
        '{"!":"ranks","v":[[[0],{"!":"tensor","rank":-1}]]}',
        '{"!":"ranks","v":[[[0],{"!":"tensor","rank":"0"}]]}',
        '{"!":"ranks","v":[[[0],{"!":"list","v":[{"!":"ranks","v":[[[0],{"!":"tensor","rank":0}]]}]}]]}',
        '{"!":"dict","k":["w~r0"],"v":[1]}',
        '{"!":"raw","dtype":"uint8","shape":[1],"v":"YQ=="}',
        '{"!":"blob","size":1,"digest":"x"}',
        '{"!":"blob","size":-1,"digest":"00000000000000000000000000000000"}',
        '{"!":"tensor","x":1}',
        '{"!":"nope"}',
        "{}",
        "[]",
        "9223372036854775808",
        "1e999",
        "NaN",
        '"\\ud800"',
        "1 2",
        "",
    ],
)
def test_malformed_nodes(node: str) -> None:
    with pytest.raises(ManifestError):
        decode_tree(node.encode())


@pytest.mark.parametrize(
    "node",
    [
        '{"!":"tensor"}',
        '{"!":"parts","k":[],"v":[],"kind":"x.Y","context":null}',
        '{"!":"per_rank"}',
        '{"!":"ranks","v":[[[0],1]]}',
        '{"!":"raw","dtype":"uint8","shape":[2],"v":"YQ=="}',
        '{"!":"raw","dtype":"object","shape":[1],"v":"YQ=="}',
        '{"!":"raw","dtype":"uint8","shape":[-1],"v":""}',
    ],
)
def test_nodes_that_no_payload_has(node: str) -> None:
    with pytest.raises(ManifestError):
        decode_tree(node.encode(), payload=True)


@pytest.mark.parametrize(
    "node",
    [
        '{"!":"range","v":[1,2,0]}',
        '{"!":"range","v":[1,2,true]}',
        '{"!":"complex","v":[1,2.0]}',
        '{"!":"str","v":"ff"}',
        '{"!":"set","v":[{"!":"list","v":[]}]}',
        '{"!":"frozenset","v":[{"!":"dict","k":[],"v":[]}]}',
        '{"!":"dict","k":["~i1","~true"],"v":[1,2]}',
        '{"!":"namespace","k":["~i1"],"v":[1],"of":"types"}',
        '{"!":"namespace","k":["~null"],"v":[1],"of":"argparse"}',
        '{"!":"namedtuple","v":[1],"module":"m","name":"N","fields":["class"]}',
        '{"!":"namedtuple","v":[1],"module":"m","name":"a b","fields":["x"]}',
        '{"!":"namedtuple","v":[1],"module":"m","name":"N","fields":["x=__import__(\'os\')"]}',
        '{"!":"enum","module":"re","name":"RegexFlag","member":"NOPE"}',
        '{"!":"codec","name":"datetime.tzinfo","v":"eyJrZXkiOiIuLi8uLi9ldGMvcGFzc3dkIn0="}',
        '{"!":"codec","name":"numpy.dtype","v":"Tw=="}',
        '{"!":"codec","name":"random.Random","v":"e30="}',
    ],
)
def test_nodes_that_stand_for_nothing(node: str) -> None:
    with pytest.raises(ManifestError):
        use(f'{{"!":"dict","k":["a"],"v":[{node}]}}'.encode(), b"")


@pytest.mark.parametrize(
    ("module", "name"), [("antigravity", "X"), ("os", "system"), ("sys", "modules"), ("pathlib", "Path"), ("", "")]
)
def test_no_module_is_imported_and_nothing_but_an_enum_is_found(module: str, name: str) -> None:
    node = msgspec.json.encode({"!": "enum", "module": module, "name": name, "member": "x"})
    with pytest.raises(UnsupportedTypeError, match="import that module"):
        use(b'{"!":"dict","k":["a"],"v":[' + node + b"]}", b"")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(("key", "value"), [("pos", "271"), ("pos", "-1"), ("key", ["0"]), ("key", "0")])
def test_a_generator_s_position_must_lie_in_its_buffer(key: str, value: Any) -> None:
    codec = next(each for each in BUILTIN if each.name == "numpy.BitGenerator")
    state = msgspec.json.decode(codec.encode(np.random.MT19937(0)))
    state["state"][key] = value
    with pytest.raises(ValueError):
        codec.decode(msgspec.json.encode(state))
