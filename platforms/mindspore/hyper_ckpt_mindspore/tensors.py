"""MindSpore's tensors, as the core sees them."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import mint

from hyper_ckpt.builtin.numpy_tensors import check_writable, memory_key, overlaps_itself
from hyper_ckpt.casts import REALS
from hyper_ckpt.contracts.platform import (
    WHOLE_FINGERPRINT_BYTES,
    Carrier,
    HostTensor,
    LocalShard,
    TensorDescription,
    Tensors,
    sampled_fingerprint,
)
from hyper_ckpt.dtypes import BY_NAME, dtype_of
from hyper_ckpt.errors import TargetError, UnsupportedDtypeError, UnsupportedStateError
from hyper_ckpt.layout import Replicated
from hyper_ckpt_mindspore.devices import Device, finish, run_of
from hyper_ckpt_mindspore.layouts import Layouts, local_tensor

# By name of the core: MindSpore's text of the dtype, which is stable, and the attribute that holds it.
_ATTRIBUTES = {
    "bool": ("Bool", "bool_"),
    "int8": ("Int8", "int8"),
    "uint8": ("UInt8", "uint8"),
    "int16": ("Int16", "int16"),
    "uint16": ("UInt16", "uint16"),
    "int32": ("Int32", "int32"),
    "uint32": ("UInt32", "uint32"),
    "int64": ("Int64", "int64"),
    "uint64": ("UInt64", "uint64"),
    "float16": ("Float16", "float16"),
    "bfloat16": ("BFloat16", "bfloat16"),
    "float32": ("Float32", "float32"),
    "float64": ("Float64", "float64"),
    "complex64": ("Complex64", "complex64"),
    "complex128": ("Complex128", "complex128"),
    "float8_e4m3fn": ("Float8E4M3FN", "float8_e4m3fn"),
    "float8_e5m2": ("Float8E5M2", "float8_e5m2"),
    "int4": ("Int4", "qint4x2"),
}
DTYPES = {name: getattr(ms, attribute) for name, (_, attribute) in _ATTRIBUTES.items() if hasattr(ms, attribute)}
NAMES = {text: name for name, (text, _) in _ATTRIBUTES.items()}

_SAMPLES, _SAMPLE_BYTES = 64, 4096  # as sampled_fingerprint takes them


class MindSporeTensors(Tensors):
    """`mindspore.Tensor`, `Parameter` and hyper-parallel's `DTensor`.

    A parameter that was made without its values (`no_init_parameters`) gets them, in place, when its shards are
    first asked for.

    Args:
        layouts: how parameters lie over ranks.
        device: says whose memory is the host's, and reads the others.
    """

    def __init__(self, layouts: Layouts, device: Device) -> None:
        self._layouts = layouts
        self._device = device

    def describe(self, value: Any) -> TensorDescription | None:
        if not isinstance(value, ms.Tensor):
            return None
        local = local_tensor(value)
        _check_storable(local)
        name = _dtype_name(local.dtype)
        if (sharding := self._layouts.of(value)) is None:
            return TensorDescription(name, tuple(local.shape), Replicated(), not local.is_meta)
        return TensorDescription(name, sharding.shape, sharding.layout, not local.is_meta)

    def local_shards(self, value: Any) -> list[LocalShard]:
        local = local_tensor(value)
        if local.has_init:
            local.init_data()
        if self._layouts.of(value) is None:
            return [LocalShard((0,) * local.ndim, tuple(local.shape), local)]
        box = self._layouts.own_box(value, local)
        return [] if box is None else [LocalShard(*box, local if local.shape == box[1] else local.reshape(box[1]))]

    def host_view(self, shard: LocalShard) -> Carrier | None:
        return _carriers(shard.data) if self._device.on_host(shard.data) else None

    def writable(self, shard: LocalShard) -> Carrier | None:
        on_host = self._device.on_host(shard.data)
        check_target(shard.data, on_host=on_host)
        return check_writable(_carriers(shard.data)) if on_host else None

    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return sampled_fingerprint([self._view_or_samples(shard) for shard in shards])

    def empty(self, description: TensorDescription, like: Any = None) -> ms.Tensor:
        if like is not None and self._layouts.of(like) is not None:
            raise UnsupportedStateError(
                "a sharded tensor without memory cannot be loaded: build the network with its values, or "
                "under no_init_parameters()"
            )
        return mint.empty(description.shape, dtype=ms_dtype(description.dtype))

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        tensor = shard.data
        if tensor.is_meta:
            return None
        finish()  # the memory is there only when the tensor was computed
        steps = [step * tensor.itemsize for step in tensor.stride()]
        key = memory_key(tensor.data_ptr(), tuple(tensor.shape), steps, _dtype_name(tensor.dtype))
        return key if key is None or self._device.on_host(tensor) else (key, str(tensor.device))

    def signature(self, value: Any) -> Hashable | None:
        if not self._is_whole(value):
            return None
        finish()  # the memory is there only when the tensor was computed
        return (str(value.dtype), value.shape, tuple(value.stride()), value.data_ptr(), str(value.device))

    def plain(self, value: Any) -> HostTensor | None:
        if not self._is_whole(value) or not self._device.on_host(value) or not value.is_contiguous():
            return None
        if str(value.dtype) not in NAMES:
            return None
        description, nbytes = _whole(str(value.dtype), tuple(value.shape))
        if not nbytes:
            return None
        finish()  # the memory is there only when the tensor was computed
        return HostTensor(description, value.data_ptr(), nbytes)

    def cast(self, values: Carrier, dtype: str, to: str) -> Carrier:
        if dtype == "float64" and to != "float32" and to in REALS:  # in two steps, as MindSpore rounds
            values, dtype = super().cast(values, dtype, "float32"), "float32"
        return super().cast(values, dtype, to)

    def _is_whole(self, value: Any) -> bool:
        """Whether it is a tensor of no class but MindSpore's own, with memory, whole on this rank."""
        own = type(value) in (ms.Tensor, ms.Parameter) and not value.has_init and not value.is_meta
        return own and self._layouts.of(value) is None

    def _view_or_samples(self, shard: LocalShard) -> Carrier:
        view = self.host_view(shard)
        return view if view is not None else device_samples(shard.data, self._device)


def device_samples(tensor: ms.Tensor, device: Device) -> Carrier:
    """What `sampled_fingerprint` would look at, brought to the host: all of a small tensor, pieces of a large one.

    Equal contents give equal fingerprints wherever they lie.
    """
    carrier = BY_NAME[_dtype_name(tensor.dtype)].carrier
    total = math.prod(tensor.shape)
    count, starts = total, np.zeros(min(total, 1), np.int64)
    if total * carrier.itemsize >= WHOLE_FINGERPRINT_BYTES:
        count = max(_SAMPLE_BYTES // carrier.itemsize, 1)
        starts = np.linspace(0, total - count, _SAMPLES).astype(np.int64)
    flat = run_of(tensor).reshape(-1)
    samples = np.empty((len(starts), count * carrier.itemsize), np.uint8)
    for start, row in zip(starts.tolist(), samples, strict=True):
        device.copy_out(flat[start : start + count], row)
    return samples.reshape(-1).view(carrier)


def ms_dtype(name: str) -> Any:
    """The MindSpore dtype called `name`.

    Raises:
        UnsupportedDtypeError: there is none.
    """
    dtype_of(name)
    if name not in DTYPES:
        raise UnsupportedDtypeError(f"MindSpore {ms.__version__} has no dtype {name}: load it as a numpy array")
    return DTYPES[name]


def check_target(tensor: ms.Tensor, *, on_host: bool) -> None:
    """Refuses tensors that cannot be written into.

    Raises:
        TargetError: elements share memory; on a device also views that don't lie in one run.
    """
    if overlaps_itself(tensor.shape, tensor.stride(), 1):
        raise TargetError(
            f"several elements of the tensor share memory (shape {tuple(tensor.shape)}, strides "
            f"{tuple(tensor.stride())}, made by expand?): load into a copy()"
        )
    if not on_host and not tensor.is_contiguous():
        raise TargetError("on a device, only contiguous tensors can be loaded into: load into its base, or a copy()")


def _carriers(tensor: ms.Tensor) -> Carrier:
    """The memory of a host tensor as an array of carriers, which keeps it alive.

    Not through `asnumpy()`: that copies views.
    """
    carrier, shape = BY_NAME[_dtype_name(tensor.dtype)].carrier, tuple(tensor.shape)
    if 0 in shape:
        return np.empty(shape, carrier)
    finish()
    strides = tuple(step * carrier.itemsize for step in tensor.stride())
    span = sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) + carrier.itemsize
    memory: Any = (ctypes.c_uint8 * span).from_address(tensor.data_ptr())
    memory.owner = tensor  # the array keeps `memory`, and that keeps the tensor
    return np.ndarray(shape, carrier, memory, 0, strides)


@functools.lru_cache(maxsize=4096)  # thousands of tensors have a few shapes
def _whole(dtype: str, shape: tuple[int, ...]) -> tuple[TensorDescription, int]:
    """The description of a plain tensor, and its bytes; 0 of one that has no shape yet."""
    count = 0 if any(length < 0 for length in shape) else math.prod(shape)
    return TensorDescription(NAMES[dtype], shape, Replicated()), count * BY_NAME[NAMES[dtype]].itemsize


def _dtype_name(dtype: Any) -> str:
    name = NAMES.get(str(dtype))
    if name is None:
        raise UnsupportedDtypeError(f"a tensor of dtype {dtype} cannot be stored: convert it with tensor.astype(...)")
    return name


def _check_storable(tensor: ms.Tensor) -> None:
    """Refuses tensors whose elements don't lie in memory as their shape and dtype say."""
    if any(length < 0 for length in tensor.shape):
        raise UnsupportedStateError(
            f"a tensor of shape {tuple(tensor.shape)} has no shape yet: run the network once before saving or loading"
        )
