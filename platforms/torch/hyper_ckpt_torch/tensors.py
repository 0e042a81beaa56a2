"""torch tensors and DTensors, as the core sees them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from hyper_ckpt.builtin.numpy_tensors import memory_key, overlaps_itself
from hyper_ckpt.casts import COMPLEX, REALS
from hyper_ckpt.contracts.platform import (
    WHOLE_FINGERPRINT_BYTES,
    Carrier,
    HostTensor,
    LocalShard,
    TensorDescription,
    TensorParts,
    Tensors,
    sampled_fingerprint,
)
from hyper_ckpt.dtypes import BY_NAME, dtype_of
from hyper_ckpt.errors import TargetError, UnsupportedDtypeError, UnsupportedStateError
from hyper_ckpt.layout import Replicated
from hyper_ckpt_torch.devices import current_device
from hyper_ckpt_torch.kinds import can_be_flattened, has_own_attributes, is_hyper_parallel, is_old_sharded, slots_of
from hyper_ckpt_torch.layouts import Layouts, as_dtensor, is_dtensor, local_tensor
from hyper_ckpt_torch.parts import parts_of

# Older releases of torch lack the youngest dtypes.
_DTYPES: dict[str, torch.dtype] = {name: vars(torch)[name] for name in BY_NAME if name in vars(torch)}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CARRIERS = {dtype: BY_NAME[name].carrier for dtype, name in NAMES.items()}
_REMEDIES = {
    "complex32": "save torch.view_as_real(tensor)",
    "float4_e2m1fn_x2": "save tensor.view(torch.uint8)",
}
# Kernels exist for these, while many lack the unsigned, fp8 and 4-bit types.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # as sampled_fingerprint takes them


class TorchTensors(Tensors):
    """`torch.Tensor`, `Parameter` and `DTensor`.

    Args:
        global_ranks: torch's rank of each rank of the platform.
    """

    def __init__(self, global_ranks: Sequence[int]) -> None:
        self._layouts = Layouts(global_ranks)

    def describe(self, value: Any) -> TensorDescription | None:
        kind: Any = type(value)
        if not issubclass(kind, torch.Tensor) or _is_elsewhere(kind):
            return None
        dtensor = as_dtensor(value)
        local = value if dtensor is None else local_tensor(dtensor)
        check_storable(local)
        if dtensor is None:
            found = _whole(value.dtype, value.shape, not value.is_meta)
            lost = own_attributes(value)
            return replace(found, save_refusal=_loses(kind, lost)) if lost else found
        return TensorDescription(
            dtype_name(value.dtype), tuple(value.shape), self._layouts.of(dtensor), not local.is_meta
        )

    def may_have_parts(self, kind: type) -> bool:
        return can_be_flattened(kind) or is_dtensor(kind)

    def parts(self, value: Any) -> TensorParts | None:
        return parts_of(value)

    def local_shards(self, value: Any) -> list[LocalShard]:
        dtensor = as_dtensor(value)
        if dtensor is None:
            return [LocalShard((0,) * value.ndim, tuple(value.shape), value.detach())]
        local = local_tensor(dtensor)
        box = self._layouts.own_box(dtensor, local)
        return [] if box is None else [LocalShard(*box, local if local.shape == box[1] else local.reshape(box[1]))]

    def host_view(self, shard: LocalShard) -> Carrier | None:
        tensor: torch.Tensor = shard.data
        if not tensor.is_cpu:
            return None
        tensor = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
        return _carriers(tensor, _form(tensor.dtype, tensor.shape, tensor.stride()))

    def writable(self, shard: LocalShard) -> Carrier | None:
        tensor: torch.Tensor = shard.data
        form = _form_of_target(tensor)
        if not tensor.is_cpu:
            return None
        _count_write(tensor)
        return _carriers(tensor, form)

    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return sampled_fingerprint([self._view_or_samples(shard) for shard in shards])

    def empty(self, description: TensorDescription, like: Any = None) -> torch.Tensor:
        dtype = torch_dtype(description.dtype)
        dtensor = as_dtensor(like)
        if dtensor is not None:
            device = current_device(dtensor.device_mesh.device_type)
            return torch.empty_like(dtensor.detach(), dtype=dtype, device=device)
        on_device = isinstance(like, torch.Tensor) and like.device.type != "meta"
        return torch.empty(description.shape, dtype=dtype, device=like.device if on_device else "cpu")

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        tensor: torch.Tensor = shard.data
        # On the meta device all pointers are 0, but views of one storage have that in common.
        on_meta = tensor.is_meta
        pointer = tensor.untyped_storage()._cdata + tensor.storage_offset() if on_meta else tensor.data_ptr()
        form = _form(tensor.dtype, tensor.shape, tensor.stride())
        key = memory_key(pointer, form.shape, form.strides, NAMES[tensor.dtype])
        # A conjugated view has the memory, but not the elements, of its base.
        view = (tensor.is_conj(), tensor.is_neg())
        on_host = tensor.is_cpu and not any(view)
        return key if on_host or key is None else (key, str(tensor.device), view)

    def signature(self, value: Any) -> Hashable | None:
        dtensor = as_dtensor(value)
        if dtensor is None:
            return memory_signature(value)
        local = memory_signature(dtensor._local_tensor)
        return None if local is None else (type(value), *self._layouts.signature(dtensor), value.shape, local)

    def plain(self, value: Any) -> HostTensor | None:
        kind: Any = type(value)
        if not _is_ordinary(kind) or not value.is_cpu or not _is_dense(value):
            return None
        if value.is_conj() or value.is_neg() or value.dtype not in NAMES:
            return None
        form = _form(value.dtype, value.shape, value.stride())
        nbytes = form.dense_nbytes
        try:
            if not nbytes or value.storage_offset() * form.carrier.itemsize + nbytes > value.untyped_storage().nbytes():
                return None
            return HostTensor(form.description, value.data_ptr(), nbytes)
        except NotImplementedError:  # a transform's (vmap, grad) tensor, which has no memory of its own
            return None

    def cast(self, values: Carrier, dtype: str, to: str) -> Carrier:
        if to not in REALS | COMPLEX:  # there is but one way, and torch lacks it for some integers
            return super().cast(values, dtype, to)
        source = torch.from_numpy(values.view(np.uint8)).view(torch_dtype(dtype))
        return source.to(torch_dtype(to)).view(torch.uint8).numpy().view(BY_NAME[to].carrier)

    def before_writes(self, values: Sequence[Any]) -> None:
        for value in values:
            _count_write(value)

    def _view_or_samples(self, shard: LocalShard) -> Carrier:
        view = self.host_view(shard)
        return view if view is not None else device_samples(shard.data)


def memory_signature(tensor: torch.Tensor) -> Hashable | None:
    """The signature of a tensor that is whole here; None for whatever is not plainly a piece of memory."""
    if not _is_dense(tensor) or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        return None
    memory = (tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.device)
    return (type(tensor), tensor.dtype, tensor.shape, tensor.stride(), memory, *own_attributes(tensor))


def own_attributes(tensor: torch.Tensor) -> list[str]:
    """The names of attributes of a tensor of a class of its own: they are no part of its elements."""
    kind: Any = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter or not has_own_attributes(kind):
        return []
    held = [name for name in slots_of(kind) if hasattr(tensor, name)]
    return [*(name for name in vars(tensor) if name != "_is_param"), *held]


def _loses(kind: type, lost: Sequence[str]) -> str:
    return (
        f"a {kind.__qualname__} has attributes beside its elements, which would be lost: "
        f"{', '.join(sorted(lost)[:8])}. Give the class __tensor_flatten__ and __tensor_unflatten__, or save "
        "value.as_subclass(torch.Tensor) and the attributes by themselves"
    )


def _count_write(tensor: torch.Tensor) -> None:
    """Writes into memory go past autograd: without this, a backward pass that saved the old values would go on with the
    new ones in silence. A DTensor counts for itself, its local tensor too."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`.

    Raises:
        UnsupportedDtypeError: there is none, or this release of torch lacks it.
    """
    dtype_of(name)
    found = _DTYPES.get(name)
    if found is None:
        raise UnsupportedDtypeError(f"torch {torch.__version__} has no dtype {name}: use a newer torch, or numpy")
    return found


def bits_dtype(dtype: torch.dtype) -> torch.dtype:
    """Integers of the item size; complex128 stays, being wider than any."""
    return _BITS.get(dtype.itemsize, dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as `bits_dtype`, strides kept."""
    return tensor.view(bits_dtype(tensor.dtype))


def check_target(tensor: torch.Tensor) -> None:
    """Refuses tensors that cannot be written into.

    Raises:
        TargetError: elements share memory, or the tensor is a lazy conjugate or negative of another one.
    """
    _form_of_target(tensor)


def _form_of_target(tensor: torch.Tensor) -> _Form:
    if tensor.is_conj() or tensor.is_neg():
        raise TargetError("a conjugated or negated view cannot be loaded into: load into its base, or a clone()")
    form = _form(tensor.dtype, tensor.shape, tensor.stride())
    if form.overlaps:
        raise TargetError(
            f"several elements of the tensor share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}, "
            "made by expand()?): load into a clone()"
        )
    return form


def device_samples(tensor: torch.Tensor) -> Carrier:
    """What `sampled_fingerprint` would look at, brought to the host: all of a small tensor, pieces of a large one.

    Equal contents give equal fingerprints whichever device holds them.
    """
    tensor = bits(tensor.detach().resolve_conj().resolve_neg())
    if tensor.nbytes >= WHOLE_FINGERPRINT_BYTES:
        count = max(_SAMPLE_BYTES // tensor.element_size(), 1)
        starts = np.linspace(0, tensor.numel() - count, _SAMPLES).astype(np.int64)
        elements = (starts[:, None] + np.arange(count)).reshape(-1)
        index = np.unravel_index(elements, tuple(tensor.shape))
        tensor = tensor[tuple(torch.from_numpy(along).to(tensor.device) for along in index)]
    view: Carrier = tensor.cpu().numpy()
    return view


def _carriers(tensor: torch.Tensor, form: _Form) -> Carrier:
    """The memory of a host tensor as an array of carriers, which keeps it alive.

    Not through `numpy()`: that marks the storage as shared for good, and FSDP can no longer free or resize it.
    """
    if form.memory is None:
        return np.empty(form.shape, form.carrier)
    memory = form.memory.from_address(tensor.data_ptr())
    memory.owner = tensor  # the array keeps `memory`, and that keeps the tensor
    return np.ndarray(form.shape, form.carrier, memory, 0, form.strides)


class _Form(NamedTuple):
    """How elements lie in memory: shape, strides in bytes, the type of all the memory they span (None: there are no
    elements), whether elements share memory, bytes where they lie row-major without gaps, else 0, and the description
    of a plain tensor of this kind."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    carrier: np.dtype[Any]
    memory: Any
    overlaps: bool
    dense_nbytes: int
    description: TensorDescription


@functools.lru_cache(maxsize=4096)  # thousands of tensors have a few shapes
def _form(dtype: torch.dtype, shape: torch.Size, steps: tuple[int, ...]) -> _Form:
    """`steps` are the strides in elements."""
    carrier = _CARRIERS[dtype]
    span = sum([(n - 1) * step for n, step in zip(shape, steps, strict=True)]) + 1
    memory = None if 0 in shape else ctypes.c_uint8 * (span * carrier.itemsize)
    strides = tuple([step * carrier.itemsize for step in steps])
    count = 1
    for length, step in zip(reversed(shape), reversed(steps), strict=True):
        count = count * length if length == 1 or step == count else 0
    nbytes, overlaps = count * carrier.itemsize, overlaps_itself(shape, steps, 1)
    return _Form(tuple(shape), strides, carrier, memory, overlaps, nbytes, _whole(dtype, shape, True))


@functools.lru_cache(maxsize=4096)
def _whole(dtype: torch.dtype, shape: torch.Size, has_memory: bool) -> TensorDescription:
    """The description of a plain tensor."""
    return TensorDescription(dtype_name(dtype), tuple(shape), Replicated(), has_memory)


@functools.lru_cache(maxsize=256)
def _is_ordinary(kind: Any) -> bool:
    """Whether it is a class of tensors that are their elements, whole on this rank."""
    own = issubclass(kind, torch.Tensor) and _has_own_data(kind) and not has_own_attributes(kind)
    return own and not _is_elsewhere(kind)


@functools.lru_cache(maxsize=256)
def _is_elsewhere(kind: Any) -> bool:
    """Whether other modules of this platform describe tensors of a class."""
    return is_hyper_parallel(kind) or is_old_sharded(kind)


@functools.lru_cache(maxsize=256)
def _has_own_data(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of this class are their elements, and have them from the beginning."""
    lazy = issubclass(kind, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer)
    return not lazy and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype.

    Raises:
        UnsupportedDtypeError: it cannot be stored; says what to do.
    """
    name = NAMES.get(dtype)
    if name is None:
        short = str(dtype).removeprefix("torch.")
        raise UnsupportedDtypeError(
            f"a tensor of dtype {dtype} cannot be stored: {_REMEDIES.get(short, 'convert it with tensor.to(...)')}"
        )
    return name


def check_storable(tensor: torch.Tensor) -> None:
    """Refuses tensors whose elements don't lie in memory as their shape and dtype say.

    Raises:
        UnsupportedStateError: says why.
    """
    try:
        if _is_dense(tensor) and (tensor.is_meta or _lies_in_its_storage(tensor)):
            return
    except NotImplementedError as error:
        raise UnsupportedStateError(
            "a tensor inside a transform (torch.func.vmap, grad) has no memory of its own: save and load outside it"
        ) from error
    kind = type(tensor).__qualname__
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedStateError(f"a {kind} has no shape yet: run the module once before saving or loading")
    if tensor.is_quantized:
        raise UnsupportedDtypeError(
            "a quantized tensor cannot be stored: save its int_repr(), scales and zero points, or its dequantize()"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedStateError(
            f"a tensor of layout {tensor.layout} cannot be stored: save its parts (indices(), values(), ...) or its "
            "to_dense()"
        )
    if tensor.is_nested:
        raise UnsupportedStateError("a nested tensor cannot be stored: save its unbind(), a list of tensors")
    if not _has_own_data(type(tensor)):
        raise UnsupportedStateError(
            f"a {kind} is a tensor only from outside, its data is elsewhere: save the plain tensors inside it, or give "
            "its class __tensor_flatten__ and __tensor_unflatten__"
        )
    raise UnsupportedStateError(
        f"a tensor of shape {tuple(tensor.shape)} has only {tensor.untyped_storage().nbytes()} bytes of memory: it was "
        "freed or shrunk (a parameter that FSDP has gathered and dropped?): take the state from state_dict()"
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in its memory as shape, strides and dtype say, if it has any."""
    strided = _has_own_data(type(tensor)) and tensor.layout is torch.strided
    return strided and not (tensor.is_quantized or tensor.is_nested)


def _lies_in_its_storage(tensor: torch.Tensor) -> bool:
    """False where the memory was freed or shrunk under the tensor."""
    nbytes, begin, count = tensor.untyped_storage().nbytes(), tensor.storage_offset(), tensor.numel()
    if tensor.is_contiguous():
        return not count or (begin + count) * tensor.element_size() <= nbytes
    span = sum([(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]) + 1
    return not count or (begin + span) * tensor.element_size() <= nbytes
