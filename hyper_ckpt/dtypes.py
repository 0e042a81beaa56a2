"""The one table of dtypes: code on disk, logical name, carrier in host memory, size.

A *carrier* is the numpy dtype whose bits hold an element: unsigned integers of the item size where
numpy has no such type. Bytes move as carriers and are never converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_ckpt.errors import UnsupportedDtypeError


@dataclass(frozen=True)
class DType:
    """One row of the table.

    `code` is what the safetensors header says. Dtypes that safetensors cannot name are stored as
    U8 with one more dimension of `itemsize` bytes; `stored_as_bytes` is then True.
    """

    name: str
    code: str
    carrier: np.dtype[np.generic]
    stored_as_bytes: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.carrier.itemsize

    def stored_shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the file's header gives for a box of `sizes` elements."""
        return (*sizes, self.itemsize) if self.stored_as_bytes and self.itemsize > 1 else sizes


def _row(name: str, code: str, carrier: str, stored_as_bytes: bool = False) -> DType:
    return DType(name, code, np.dtype(carrier), stored_as_bytes)


TABLE = (
    _row("bool", "BOOL", "?"),
    _row("uint8", "U8", "u1"),
    _row("int8", "I8", "i1"),
    _row("uint16", "U16", "<u2"),
    _row("int16", "I16", "<i2"),
    _row("uint32", "U32", "<u4"),
    _row("int32", "I32", "<i4"),
    _row("uint64", "U64", "<u8"),
    _row("int64", "I64", "<i8"),
    _row("float16", "F16", "<f2"),
    _row("bfloat16", "BF16", "<u2"),
    _row("float32", "F32", "<f4"),
    _row("float64", "F64", "<f8"),
    _row("complex64", "C64", "<c8"),
    _row("complex128", "U8", "<c16", True),
    _row("float8_e4m3fn", "F8_E4M3", "u1"),
    _row("float8_e5m2", "F8_E5M2", "u1"),
    _row("float8_e8m0fnu", "F8_E8M0", "u1"),
    _row("float8_e4m3fnuz", "F8_E4M3FNUZ", "u1"),
    _row("float8_e5m2fnuz", "F8_E5M2FNUZ", "u1"),
    # One byte an element: the packed 4-bit types of safetensors are not used.
    _row("int4", "U8", "u1", True),
    _row("uint4", "U8", "u1", True),
)

BY_NAME = {row.name: row for row in TABLE}


def dtype_of(name: str) -> DType:
    """The row called `name`.

    Raises:
        UnsupportedDtypeError: no such dtype can be stored.
    """
    try:
        return BY_NAME[name]
    except KeyError:
        raise UnsupportedDtypeError(
            f"dtype {name!r} cannot be stored; supported are {', '.join(BY_NAME)}. "
            "Convert the tensor, or register a codec for its type."
        ) from None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype called `name`; those that numpy lacks come from ml_dtypes."""
    row = dtype_of(name)
    if row.carrier.name == name:
        return row.carrier
    import ml_dtypes  # here, so that nobody pays for it who has no such tensor

    return np.dtype(getattr(ml_dtypes, name))
