"""Codecs for random generators: their state as numbers, checked, never pickled.

A target's own generator is set in place, so that whoever draws from it goes on where the saved one stood.
The seed sequence from which numpy's generators `spawn` children is not part of their state.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np

from hyper_ckpt.contracts.codec import Codec

_State = dict[str, Any]
_BIT_GENERATORS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}

# numpy's C code trusts these numbers: a position beyond its buffer reads foreign memory.
_LARGEST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1, "uinteger": 2**32 - 1}


def _packed(value: Any) -> Any:
    """The state of a generator as JSON: arrays as lists, ints in hexadecimal since they have up to 128 bits."""
    if isinstance(value, dict):
        return {key: _packed(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [_packed(item) for item in value.tolist()]
    if isinstance(value, float):
        return value.hex()
    return value if isinstance(value, str) else f"{value:x}"


def _unpacked(key: str, wire: Any, like: Any) -> Any:
    """The reverse, accepting only what has the form of `like`, the state of a new generator of the same kind."""
    if isinstance(like, dict):
        if not isinstance(wire, dict) or wire.keys() != like.keys():
            raise ValueError("the state of another kind of generator")
        return {key: _unpacked(key, wire[key], like[key]) for key in like}
    if isinstance(like, np.ndarray):
        if not isinstance(wire, list) or len(wire) != like.size:
            raise ValueError(f"{key} has another length")
        return np.array([int(item, 16) for item in wire], dtype=like.dtype).reshape(like.shape)
    if isinstance(like, str):
        return like
    if isinstance(like, float):
        return float.fromhex(wire)
    number = int(wire, 16)
    if not 0 <= number <= _LARGEST.get(key, 2**128 - 1):
        raise ValueError(f"{key} is out of range")
    return number


def _read(data: bytes) -> tuple[_State, Any]:
    """The wire form of a state, and a new bit generator of its kind."""
    wire = msgspec.json.decode(data, type=_State)
    name = wire.get("bit_generator")
    if not isinstance(name, str) or name not in _BIT_GENERATORS:
        raise ValueError("an unknown bit generator")
    return wire, _BIT_GENERATORS[name](0)


def _encode_bit_generator(value: np.random.BitGenerator) -> bytes:
    if _BIT_GENERATORS.get(type(value).__name__) is not type(value):
        raise ValueError(f"{type(value).__name__} is not one of {', '.join(_BIT_GENERATORS)}")
    return msgspec.json.encode(_packed(value.state))


def _decode_bit_generator(data: bytes) -> Any:
    wire, bit_generator = _read(data)
    bit_generator.state = _unpacked("state", wire, bit_generator.state)
    return bit_generator


def _assign_bit_generator(target: Any, saved: Any) -> None:
    target.state = saved.state


def _assign_generator(target: np.random.Generator, saved: np.random.Generator) -> None:
    if type(target.bit_generator) is type(saved.bit_generator):
        target.bit_generator.state = saved.bit_generator.state
    else:
        # Re-initialising a generator is how it gets another kind of bit generator.
        target.__init__(saved.bit_generator)  # type: ignore[misc]


def _encode_random_state(value: np.random.RandomState) -> bytes:
    return msgspec.json.encode(_packed(value.get_state(legacy=False)))


def _decode_random_state(data: bytes) -> np.random.RandomState:
    wire, bit_generator = _read(data)
    value = np.random.RandomState(bit_generator)
    value.set_state(_unpacked("state", wire, value.get_state(legacy=False)))
    return value


def _assign_random_state(target: np.random.RandomState, saved: np.random.RandomState) -> None:
    state: Any = saved.get_state(legacy=False)
    own: Any = target.get_state(legacy=False)
    if own["bit_generator"] != state["bit_generator"]:
        target.__init__(_BIT_GENERATORS[state["bit_generator"]](0))  # type: ignore[misc]
    target.set_state(state)


def _encode_random(value: random.Random) -> bytes:
    version, words, gauss = value.getstate()
    return msgspec.json.encode((version, words, None if gauss is None else gauss.hex()))


def _decode_random(data: bytes) -> random.Random:
    version, words, gauss = msgspec.json.decode(data, type=tuple[int, tuple[int, ...], str | None])
    if any(not 0 <= word < 1 << 32 for word in words):
        raise ValueError("a word is out of range")
    value = random.Random(0)
    value.setstate((version, words, None if gauss is None else float.fromhex(gauss)))
    return value


def _assign_random(target: random.Random, saved: random.Random) -> None:
    target.setstate(saved.getstate())


CODECS = (
    Codec("random.Random", random.Random, _encode_random, _decode_random, assign=_assign_random),
    Codec(
        "numpy.BitGenerator",
        np.random.BitGenerator,
        _encode_bit_generator,
        _decode_bit_generator,
        subclasses=True,
        assign=_assign_bit_generator,
    ),
    Codec(
        "numpy.Generator",
        np.random.Generator,
        lambda value: _encode_bit_generator(value.bit_generator),
        lambda data: np.random.Generator(_decode_bit_generator(data)),
        assign=_assign_generator,
    ),
    Codec(
        "numpy.RandomState",
        np.random.RandomState,
        _encode_random_state,
        _decode_random_state,
        assign=_assign_random_state,
    ),
)
