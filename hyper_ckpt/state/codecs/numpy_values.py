"""Codecs for numpy's scalars and dtypes, those of ml_dtypes included: the width and the bits.

Where C has two types of one width (long and long long), the one that numpy calls int64 comes back.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import ml_dtypes
import numpy as np

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.errors import UnsupportedTypeError

AnyDType = np.dtype[Any]

# numpy has no strings for the dtypes of ml_dtypes; those that this release of it has, by name.
_EXTENSIONS: dict[str, AnyDType] = {
    cls.__name__: np.dtype(cls)
    for cls in vars(ml_dtypes).values()
    if isinstance(cls, type) and issubclass(cls, np.generic)
}

# Only these: numpy reads much more from a string, lists of fields and Python objects among it.
_DTYPE = re.compile(r"[<>|=][?bBiufcmMSUV]\d{0,9}(\[\d{0,18}[a-zA-Z]{1,7}(/\d{1,9})?\])?", re.ASCII)


def _name_of(dtype: AnyDType) -> str:
    # `in` first: numpy takes None for float64, and says that they are equal.
    if dtype.type.__name__ in _EXTENSIONS and _EXTENSIONS[dtype.type.__name__] == dtype:
        return dtype.type.__name__
    if dtype.fields is None and dtype.subdtype is None and _DTYPE.fullmatch(dtype.str) and not dtype.metadata:
        return dtype.str
    raise UnsupportedTypeError(f"numpy dtype {dtype!r} cannot be stored: no fields, objects or metadata")


def _dtype_of(name: str) -> AnyDType:
    if name in _EXTENSIONS:
        return _EXTENSIONS[name]
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"{name!r:.100} is not the name of a dtype")
    return np.dtype(name)


def _encode_scalar(value: np.generic) -> bytes:
    if value.dtype.kind == "V" and value.dtype.type is np.void:
        raise UnsupportedTypeError("a structured or void scalar of numpy cannot be stored: store bytes or its fields")
    little = value.dtype.newbyteorder("<") if sys.byteorder == "big" else value.dtype
    return f"{_name_of(little)}\n".encode() + np.asarray(value, dtype=little).tobytes()


def _decode_scalar(data: bytes) -> np.generic:
    name, _, bits = data.partition(b"\n")
    dtype = _dtype_of(name.decode())
    if len(bits) != dtype.itemsize:
        raise ValueError("the bits of a scalar don't fit its dtype")
    value = np.frombuffer(bits, dtype=dtype)[0]
    if type(value) is not dtype.type or dtype.type is np.void:
        raise ValueError(f"{dtype} has no scalars that can be stored")
    return value  # type: ignore[no-any-return]


CODECS = (
    # Strings by themselves: arrays drop trailing zeros, and so does numpy's own str().
    Codec(
        "numpy.str_",
        np.str_,
        lambda value: str.encode(value, errors="surrogatepass"),
        lambda data: np.str_(data.decode(errors="surrogatepass")),
    ),
    Codec("numpy.bytes_", np.bytes_, bytes, np.bytes_),
    Codec("numpy.generic", np.generic, _encode_scalar, _decode_scalar, subclasses=True),
    Codec(
        "numpy.dtype",
        np.dtype,
        lambda dtype: _name_of(dtype).encode(),
        lambda data: _dtype_of(data.decode()),
        subclasses=True,
    ),
)
