"""Whole small tensors between a platform and bytes, and copies that are left when something failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from hyper_ckpt.contracts.platform import Pending, Stager, TensorDescription, Tensors
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt.layout import Replicated


def settle(pending: Iterable[Pending]) -> None:
    """After a failure: waits until no copy reads or writes host memory any more, whatever becomes of it."""
    for each in pending:
        with contextlib.suppress(Exception):  # the failure that led here is the one to report
            each.wait()


def to_host(tensors: Tensors, stager: Stager, value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor's dtype, shape and row-major bytes.

    Raises:
        UnsupportedLayoutError: it is distributed.
    """
    description = tensors.describe(value)
    if description is None or not isinstance(description.layout, Replicated):
        raise UnsupportedLayoutError("a PerRank value must not hold distributed tensors: save them outside of it")
    (shard,) = tensors.local_shards(value)
    view = tensors.host_view(shard)
    if view is not None:
        return description.dtype, description.shape, np.ascontiguousarray(view).tobytes()
    nbytes = int(np.prod(description.shape, dtype=np.int64)) * dtype_of(description.dtype).itemsize
    buffer = stager.buffer(nbytes)
    try:
        stager.copy_out(shard, buffer).wait()
        return description.dtype, description.shape, buffer[:nbytes].tobytes()
    finally:
        stager.release(buffer)


def from_host(
    tensors: Tensors, stager: Stager, dtype: str, shape: tuple[int, ...], data: bytes, like: Any = None
) -> Any:
    """A new tensor of the platform, or of the kind of `like`, holding row-major bytes."""
    value = tensors.empty(TensorDescription(dtype, shape, Replicated()), like)
    (shard,) = tensors.local_shards(value)
    view = tensors.writable(shard)
    if view is not None:
        view[...] = np.frombuffer(data, dtype_of(dtype).carrier).reshape(shape)
        return value
    buffer = stager.buffer(len(data))
    try:
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        stager.copy_in(buffer, shard).wait()
        return value
    finally:
        stager.release(buffer)
