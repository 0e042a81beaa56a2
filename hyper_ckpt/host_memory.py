"""Host memory by address."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Memory that somebody else keeps alive."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def address_of(array: npt.NDArray[Any]) -> int:
    """Where the first element of an array lies."""
    if array.flags.c_contiguous and array.flags.writeable and array.size:
        with contextlib.suppress(ValueError):  # a dtype that buffers don't know
            return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # four times as fast as numpy's own way
    address: int = array.__array_interface__["data"][0]
    return address


def region_of(array: npt.NDArray[Any]) -> tuple[int, int]:
    """The addresses between which the elements of an array lie; it has some."""
    low = address_of(array)
    if array.flags.c_contiguous:
        return low, low + array.nbytes
    spans = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    low += sum([min(span, 0) for span in spans])
    return low, low + sum(map(abs, spans)) + array.itemsize


def array_at(address: int, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The same memory as a row-major array, which may be written."""
    return np.frombuffer(bytes_at(address, nbytes), dtype).reshape(shape)
