"""Plain Python values that hold no others, to nodes and back, bit for bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from hyper_ckpt.errors import ManifestError
from hyper_ckpt.state.tree import (
    ByteArrayNode,
    BytesNode,
    ComplexNode,
    FloatNode,
    IntNode,
    Node,
    RangeNode,
    StrNode,
)

_INT64 = range(-(1 << 63), 1 << 63)


def _of_int(value: int) -> Node:
    return value if value in _INT64 else IntNode(f"{value:x}")


def _of_float(value: float) -> Node:
    return value if math.isfinite(value) else FloatNode(struct.pack(">d", value).hex())


def _of_str(value: str) -> Node:
    try:
        # isascii is free; only other strings are encoded to find out.
        if not value.isascii():
            value.encode()
        return value
    except UnicodeEncodeError:
        return StrNode(value.encode(errors="surrogatepass").hex())


def _of_complex(value: complex) -> Node:
    return ComplexNode((_of_float(value.real), _of_float(value.imag)))


def _of_range(value: range) -> Node:
    return RangeNode((_of_int(value.start), _of_int(value.stop), _of_int(value.step)))


SCALARS: dict[type, Callable[[Any], Node]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _of_int,
    float: _of_float,
    str: _of_str,
    complex: _of_complex,
    bytes: BytesNode,
    bytearray: lambda value: ByteArrayNode(bytes(value)),
    range: _of_range,
}
"""By exact type: what makes a node of a value."""


def int_of(node: Node) -> int:
    """The int that a node stands for.

    Raises:
        ManifestError: it stands for something else.
    """
    if isinstance(node, IntNode):
        return int(node.v, 16)
    if type(node) is int:
        return node
    raise ManifestError("a number in the state's structure is not an int")


def float_of(node: Node) -> float:
    """The float that a node stands for.

    Raises:
        ManifestError: it stands for something else.
    """
    if isinstance(node, FloatNode):
        (value,) = struct.unpack(">d", bytes.fromhex(node.v))
        return float(value)
    if type(node) is float:
        return node
    raise ManifestError("a number in the state's structure is not a float")


def str_of(node: StrNode) -> str:
    """The string with lone surrogates that a node stands for.

    Raises:
        ManifestError: its bytes are no string's.
    """
    try:
        return bytes.fromhex(node.v).decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise ManifestError(f"a string in the state's structure is damaged: {error}") from error


def complex_of(node: ComplexNode) -> complex:
    """The complex number that a node stands for."""
    return complex(float_of(node.v[0]), float_of(node.v[1]))


def range_of(node: RangeNode) -> range:
    """The range that a node stands for.

    Raises:
        ManifestError: its step is zero.
    """
    start, stop, step = map(int_of, node.v)
    if step == 0:
        raise ManifestError("a range in the state's structure has step 0")
    return range(start, stop, step)
