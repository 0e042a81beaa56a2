"""Which dtypes a load may convert into which, and how numpy does it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hyper_ckpt.dtypes import dtype_of, numpy_dtype

# Without float8_e8m0fnu, which holds scales: neither a sign nor zero, so that rounding to it is a decision.
REALS = frozenset({
    "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
})  # fmt: skip
COMPLEX = frozenset({"complex64", "complex128"})
INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


def may_cast(dtype: str, to: str) -> bool:
    """Whether values are converted from one dtype to another: between real floats, whatever they lose; between complex
    ones; and from integers to integers that hold every value of them. Told by the dtypes alone."""
    if {dtype, to} <= REALS or {dtype, to} <= COMPLEX:
        return True
    return {dtype, to} <= INTEGERS and np.can_cast(numpy_dtype(dtype), numpy_dtype(to))


def convert(values: npt.NDArray[Any], dtype: str, to: str) -> npt.NDArray[Any]:
    """Elements converted as numpy does it: to the nearest, ties to even.

    Args:
        values: carriers of elements of `dtype`, contiguous.

    Returns:
        A new array of carriers of elements of `to`.
    """
    with np.errstate(all="ignore"):  # infinity and nan are values like any other
        return values.view(numpy_dtype(dtype)).astype(numpy_dtype(to)).view(dtype_of(to).carrier)
