"""numpy arrays as tensors of a platform: each is whole on its rank and lies in host memory."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from hyper_ckpt.contracts.platform import (
    Carrier,
    HostTensor,
    LocalShard,
    TensorDescription,
    Tensors,
    sampled_fingerprint,
)
from hyper_ckpt.dtypes import BY_NAME, numpy_dtype
from hyper_ckpt.errors import TargetError, UnsupportedDtypeError, UnsupportedStateError
from hyper_ckpt.host_memory import address_of
from hyper_ckpt.layout import Replicated

_REMEDIES = {
    "O": "save the objects as plain Python values, or register a codec for their type",
    "U": "save `.tolist()`, or encode the text as uint8",
    "S": "save `.view(np.uint8)`",
    "M": 'save `.view("int64")` and the unit',
    "m": 'save `.view("int64")` and the unit',
    "V": "save each field as an array of its own",
    "f": 'convert it, e.g. `.astype("float64")`',
    "c": 'convert it, e.g. `.astype("complex128")`',
}


class NumpyTensors(Tensors):
    """`np.ndarray`, a view included: what it shows is stored, never the memory behind it."""

    def describe(self, value: Any) -> TensorDescription | None:
        if not isinstance(value, np.ndarray):
            return None
        if isinstance(value, np.ma.MaskedArray):
            raise UnsupportedStateError("a masked array holds two arrays: save its `.data` and its `.mask`")
        return TensorDescription(_dtype_name(value.dtype), value.shape, Replicated())

    def local_shards(self, value: Any) -> list[LocalShard]:
        array = np.asarray(value)  # drops subclasses such as np.matrix, whose views have their own rules
        return [LocalShard((0,) * array.ndim, array.shape, array)]

    def host_view(self, shard: LocalShard) -> Carrier:
        array: Carrier = shard.data
        return array.view(_carrier(array.dtype))

    def writable(self, shard: LocalShard) -> Carrier:
        return check_writable(self.host_view(shard))

    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return sampled_fingerprint([self.host_view(shard) for shard in shards])

    def empty(self, description: TensorDescription, like: Any = None) -> Carrier:
        return np.empty(description.shape, numpy_dtype(description.dtype))

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        array: Carrier = shard.data
        return memory_key(address_of(array), array.shape, array.strides, _dtype_name(array.dtype))

    def signature(self, value: Any) -> Hashable | None:
        address = address_of(value)
        return (type(value), value.dtype, value.shape, value.strides, address)

    def plain(self, value: Any) -> HostTensor | None:
        flags = value.flags if type(value) is np.ndarray else None
        if flags is None or not (flags.c_contiguous and flags.writeable and value.size):
            return None
        try:
            name = _dtype_name(value.dtype)
        except UnsupportedDtypeError:
            return None
        return HostTensor(TensorDescription(name, value.shape, Replicated()), address_of(value), value.nbytes)


def check_writable(view: Carrier) -> Carrier:
    """Returns `view` if each of its elements has memory of its own that may be written.

    Raises:
        TargetError: it is read-only, or elements overlap (a broadcast view).
    """
    if not view.flags.writeable:
        raise TargetError(
            "the array is read-only (made by np.broadcast_to, np.frombuffer, a read-only memmap?): load into a copy"
        )
    if overlaps_itself(view.shape, view.strides, view.itemsize):
        raise TargetError(
            f"several elements share memory (shape {view.shape}, strides {view.strides}): load into a copy"
        )
    return view


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether elements may share bytes. Exact for slices, transpositions and broadcasts of a dense array.

    A dimension is sound if its stride steps over all that the smaller strides span; an interleaving that
    breaks this without overlapping can only be made with `as_strided` and counts as overlapping.
    """
    return _overlaps(tuple(shape), tuple(strides), itemsize)


@functools.lru_cache(maxsize=4096)  # thousands of tensors have a few shapes
def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if 0 in shape:
        return False
    span = itemsize
    for stride, length in sorted(
        (abs(stride), length) for stride, length in zip(strides, shape, strict=True) if length > 1
    ):
        if stride < span:
            return True
        span += stride * (length - 1)
    return False


def memory_key(pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> Hashable | None:
    """A storage key for host memory (strides in bytes), the same whatever framework shows the memory."""
    form = _memory_form(tuple(shape), tuple(strides), dtype)
    return None if form is None else (pointer, form)


@functools.lru_cache(maxsize=4096)
def _memory_form(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Hashable | None:
    """Shape, dtype and the strides that count: that of a dimension of length 1 is never used and may be anything. None:
    no elements."""
    if 0 in shape:
        return None
    return shape, tuple([stride if length > 1 else 0 for stride, length in zip(strides, shape, strict=True)]), dtype


@functools.lru_cache(maxsize=256)
def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return BY_NAME[dtype.name].carrier


@functools.lru_cache(maxsize=256)  # numpy works its names out anew each time
def _dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype that can be stored; refuses the others with what to do instead."""
    if dtype.name in BY_NAME and BY_NAME[dtype.name].itemsize == dtype.itemsize:
        if dtype.str.startswith(">"):
            raise UnsupportedDtypeError(
                f"a big-endian array ({dtype.str}) cannot be stored: convert it with "
                '`.astype(array.dtype.newbyteorder("<"))`'
            )
        return dtype.name
    remedy = _REMEDIES.get(dtype.kind, "convert it to a supported dtype")
    raise UnsupportedDtypeError(f"a numpy array of dtype {dtype} cannot be stored: {remedy}")
