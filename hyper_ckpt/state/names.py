"""The name of a leaf: the keys on the way to it, escaped and joined with "/".

Dots are ordinary characters, so weights keep the names people know: `{"model": {"layers.0.weight": t}}`
is `model/layers.0.weight`. As in JSON Pointer (RFC 6901), "~" introduces what is not verbatim:

    "~0"  a "~"           "~1"  a "/"          "~ud800"  a lone surrogate, anywhere in a string key
    "~i1" the int 1       "~true" "~false"     "~null"   None
    "~f1.5" a float       "~c0.0,1.0" complex  "~x00ff"  bytes
    "~t(a~,~i1~,~)" the tuple ("a", 1)

Where ranks hold different tensors under one name, each variant is stored as that name and "~r3", the lowest rank that
holds it.

Items of lists, tuples and deques are their plain number, fields of namedtuples their name. Two paths
through one state never share a name, and a key is read back exactly, type included.
"""

from __future__ import annotations

import fnmatch
import re
import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hyper_ckpt.errors import ManifestError, UnsupportedTypeError

Key = str | int | float | bool | complex | bytes | tuple[Any, ...] | None
"""What can be the key of a dict; the items of a tuple are keys again."""

_SPECIAL = re.compile("[~/\ud800-\udfff]")
_ESCAPED = re.compile("~(0|1|u[0-9a-f]{4})")
_NAN = struct.pack(">d", float("nan"))


def join(parent: str | None, part: str) -> str:
    """The name of what stands under `part` in `parent`; None is the state itself.

    The state is None rather than "", because "" is the name of what stands under its empty key.
    """
    return part if parent is None else f"{parent}/{part}"


def join_all(parent: str | None, parts: Sequence[str]) -> Sequence[str]:
    """`join` for each of many parts."""
    return parts if parent is None else [f"{parent}/{part}" for part in parts]


def expand(keys: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that keys stand for: each one itself, or those that it matches as a pattern, in which `*`, `?` and
    `[...]` stand for any characters, also "/". A key that stands for none is kept."""
    known, out = set(names), list[str]()
    for key in keys:
        out += (fnmatch.filter(names, key) if key not in known else ()) or [key]
    return out


def is_below(name: str, tops: Collection[str]) -> bool:
    """Whether a name is one of `tops`, or lies below one of them."""
    return name in tops or (bool(tops) and any(name[:at] in tops for at, c in enumerate(name) if c == "/"))


def variant_name(name: str, rank: int) -> str:
    """The name that a variant of a tensor is stored under; `rank` is the lowest of those that hold it. No leaf has such
    a name: "~r" escapes nothing."""
    return f"{name}~r{rank}"


def shown(name: str | None) -> str:
    """A name for messages, control characters and surrogates made visible."""
    return "the state itself" if name is None else repr(name)


def escape_key(key: Any, parent: str | None = None) -> str:
    """The part of a name that stands for a dict's key.

    Raises:
        UnsupportedTypeError: a key that is not of exactly one of the types of `Key`; names `parent`.
    """
    encoder = _ENCODERS.get(type(key))
    if encoder is not None:
        return encoder(key)
    if type(key) is tuple:
        return "~t(" + "".join(escape_key(item, parent) + "~," for item in key) + "~)"
    raise UnsupportedTypeError(
        f"{shown(parent)} has a key of type {type(key).__module__}.{type(key).__qualname__}: {key!r:.100}. "
        "Keys may be str, int, float, bool, None, complex, bytes, or tuples of these: convert it."
    )


def escape_keys(keys: Collection[Any], parent: str | None) -> tuple[str, ...]:
    """`escape_key` of each of a dict's keys."""
    if set(map(type, keys)) == {str} and not _SPECIAL.search("".join(keys)):
        return tuple(keys)
    return tuple([escape_key(key, parent) for key in keys])


def parse_key(part: str) -> Key:
    """The key that `escape_key` was given.

    Raises:
        ManifestError: `part` is not exactly what `escape_key` writes for any key.
    """
    try:
        key, rest = _parse(part)
        # One key, one spelling: else two entries of a dict could be read as the same key.
        if not rest and escape_key(key) == part:
            return key
    except (ValueError, ArithmeticError, struct.error, RecursionError):
        pass
    raise ManifestError(f"{part!r:.200} is not an escaped key")


def _parse(text: str) -> tuple[Key, str]:
    """One key from the start of `text`, and what follows it."""
    if not text.startswith("~t("):
        end = text.find("~,")
        scalar, rest = (text, "") if end < 0 else (text[:end], text[end:])
        return _parse_scalar(scalar), rest
    items, text = [], text[3:]
    while not text.startswith("~)"):
        item, text = _parse(text)
        if not text.startswith("~,"):
            raise ValueError("unfinished tuple")
        items.append(item)
        text = text[2:]
    return tuple(items), text[2:]


def _parse_scalar(text: str) -> Key:
    if text in _WORDS:
        return _WORDS[text]
    decoder = _DECODERS.get(text[:2])
    if decoder is not None:
        return decoder(text[2:])
    return _ESCAPED.sub(_unescape, text)


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return {"~": "~0", "/": "~1"}.get(character) or f"~u{ord(character):04x}"


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    return {"0": "~", "1": "/"}.get(code) or chr(int(code[1:], 16))


def _escape_str(key: str) -> str:
    return _SPECIAL.sub(_escape, key)


def _escape_int(key: int) -> str:
    # Python limits the digits of decimal conversions, not of hexadecimal ones.
    return f"~i{key}" if abs(key) < 1 << 63 else f"~i{key:#x}"


def _parse_int(text: str) -> int:
    return int(text, 16) if text.removeprefix("-").startswith("0x") else int(text)


def _float_text(value: float) -> str:
    bits = struct.pack(">d", value)
    # repr keeps neither the sign nor the payload of a nan.
    return f"nan:{bits.hex()}" if value != value and bits != _NAN else repr(value)


def _parse_float(text: str) -> float:
    if text.startswith("nan:"):
        (value,) = struct.unpack(">d", bytes.fromhex(text[4:]))
        return float(value)
    return float(text)


def _escape_complex(key: complex) -> str:
    return f"~c{_float_text(key.real)},{_float_text(key.imag)}"


def _parse_complex(text: str) -> complex:
    real, imag = text.split(",")
    return complex(_parse_float(real), _parse_float(imag))


_WORDS: dict[str, Key] = {"~true": True, "~false": False, "~null": None}

_ENCODERS: dict[type, Callable[[Any], str]] = {
    str: _escape_str,
    int: _escape_int,
    bool: lambda key: "~true" if key else "~false",
    type(None): lambda key: "~null",
    float: lambda key: f"~f{_float_text(key)}",
    complex: _escape_complex,
    bytes: lambda key: f"~x{key.hex()}",
}

_DECODERS: dict[str, Callable[[str], Key]] = {
    "~i": _parse_int,
    "~f": _parse_float,
    "~c": _parse_complex,
    "~x": bytes.fromhex,
}
