"""What `Tensors` promises of plain tensors: how they are described, seen and written to."""

from __future__ import annotations

import numpy as np

from hyper_ckpt.contracts.platform import TensorDescription
from hyper_ckpt.dtypes import BY_NAME, dtype_of
from hyper_ckpt.errors import TargetError
from hyper_ckpt.layout import Replicated
from hyper_ckpt.testing.conformance.check import NotApplicable, Part, expect, fail
from hyper_ckpt.testing.conformance.subject import STRIDED_SHAPES, Subject, content, same_bytes

tensors = Part("tensors")


@tensors
def dtypes_are_known(s: Subject) -> None:
    """Every dtype of the platform is a row of hyper_ckpt.dtypes."""
    unknown = [name for name in s.probe.dtypes if name not in BY_NAME]
    expect(
        bool(s.probe.dtypes) and not unknown,
        "PlatformProbe.dtypes names rows of hyper_ckpt.dtypes, one at least",
        f"unknown: {unknown}" if unknown else "no dtype at all",
        f"use names of {', '.join(BY_NAME)}",
    )


@tensors
def describe_says_dtype_shape_and_layout(s: Subject) -> None:
    """`describe` of a plain tensor gives its dtype's name, its shape, Replicated(), and that it has memory."""
    for dtype, shape, data in s.cases():
        got = s.tensors.describe(s.probe.make(dtype, shape, data))
        wanted = TensorDescription(dtype, shape, Replicated())
        expect(got == wanted, f"describe gives {wanted}", f"{got}", "correct Tensors.describe for this dtype and shape")
        assert got is not None
        plain = type(got.shape) is tuple and all(type(n) is int for n in got.shape)
        expect(plain, "shape is a tuple of Python ints", f"{got.shape!r}", "convert it: tuple(map(int, shape))")


@tensors
def describe_gives_the_same_answer_twice(s: Subject) -> None:
    """`describe` of one tensor gives equal answers each time, and does not change the tensor."""
    data = content(s.dtype, (3, 4))
    value = s.probe.make(s.dtype, (3, 4), data)
    first, second = s.tensors.describe(value), s.tensors.describe(value)
    expect(first == second, "equal answers for one tensor", f"{first}, then {second}", "keep no state in describe")
    s.same(value, data, "describe changes nothing", "do not write to the tensor in Tensors.describe")


def described(s: Subject, value: object) -> TensorDescription | None:
    """What `describe` says of a value that is no tensor."""
    try:
        return s.tensors.describe(value)
    except Exception as error:
        fail(
            "describe gives None for what is no tensor",
            f"for a {type(value).__name__}, {type(error).__name__}: {error}",
            "decide by the value's type alone, before looking at anything else: if not isinstance(value, ...)",
        )


@tensors
def describe_knows_only_tensors(s: Subject) -> None:
    """`describe` gives None for what is no tensor: numbers, texts, None, containers of tensors, types."""
    tensor = s.probe.make(s.dtype, (2,), content(s.dtype, (2,)))
    for value in (None, 3, 2.5, True, "text", b"bytes", object(), [tensor], (tensor,), {"a": tensor}, type(tensor)):
        got = described(s, value)
        expect(
            got is None,
            "describe gives None for what is no tensor",
            f"{got} for a {type(value).__name__}",
            "decide by the value's type alone",
        )


@tensors
def local_shards_of_a_plain_tensor(s: Subject) -> None:
    """A plain tensor has one local shard: offsets 0, its own shape; also one that is empty or has no dimension."""
    for dtype, shape, data in s.cases():
        shard = s.shard(s.probe.make(dtype, shape, data))
        got, wanted = (tuple(shard.offsets), tuple(shard.sizes)), ((0,) * len(shape), shape)
        expect(got == wanted, f"(offsets, sizes) = {wanted}", f"{got} for {dtype}", "correct Tensors.local_shards")


def _check_view(s: Subject, dtype: str, shape: tuple[int, ...], data: bytes, value: object) -> bool:
    """Whether there is a host view, which then must show `data`."""
    view = s.tensors.host_view(s.shard(value))
    if view is None:
        return False
    got, wanted = (view.shape, view.dtype), (shape, dtype_of(dtype).carrier)
    expect(
        got == wanted,
        f"host_view of a {dtype} tensor is an array of {wanted[1]} of shape {shape}",
        f"{got[1]} of shape {got[0]}",
        "view the memory as hyper_ckpt.dtypes.dtype_of(name).carrier, in shape shard.sizes",
    )
    same_bytes(view.tobytes(), data, f"host_view shows the bytes of a {dtype} tensor of shape {shape}", "see host_view")
    return True


@tensors
def host_view_shows_the_bytes(s: Subject) -> None:
    """`host_view` is an array of carriers in the shard's shape over the tensor's bytes; None outside host memory."""
    for dtype, shape, data in s.cases():
        _check_view(s, dtype, shape, data, s.probe.make(dtype, shape, data))


@tensors
def host_view_of_strided_tensors(s: Subject) -> None:
    """`host_view` of a strided tensor shows its own elements in their order, not the memory around them."""
    for dtype in s.probe.dtypes:
        for shape in STRIDED_SHAPES:
            data = content(dtype, shape)
            _check_view(s, dtype, shape, data, s.strided(dtype, shape, data))


@tensors
def host_view_follows_the_work(s: Subject) -> None:
    """`host_view` shows what the framework wrote last, once the work is done; it is no copy of an earlier state."""
    shape = (200, 100)
    value = s.probe.make(s.dtype, shape, content(s.dtype, shape))
    if s.tensors.host_view(s.shard(value)) is None:
        raise NotApplicable("tensors of this platform are not in host memory")
    for seed in range(1, 4):
        data = content(s.dtype, shape, seed)
        s.probe.overwrite(value, data)
        s.probe.raw(value)  # the view is complete once pending work has run
        _check_view(s, s.dtype, shape, data, value)


@tensors
def writes_change_the_tensor(s: Subject) -> None:
    """Writes through `writable`, or by `copy_in` where that is None, change the tensor in place."""
    for dtype, shape, data in s.cases():
        value, new = s.probe.make(dtype, shape, data), content(dtype, shape, 1)
        s.put(value, new)
        s.same(
            value,
            new,
            f"writes change a {dtype} tensor of shape {shape} in place",
            "return a view of the tensor's own memory from Tensors.writable, or None and write in Stager.copy_in",
        )


@tensors
def writes_change_strided_tensors(s: Subject) -> None:
    """Writes into a strided tensor arrive in it, element by element."""
    for dtype in s.probe.dtypes:
        for shape in STRIDED_SHAPES:
            value, new = s.strided(dtype, shape, content(dtype, shape)), content(dtype, shape, 1)
            s.put(value, new)
            s.same(
                value,
                new,
                f"writes arrive in a strided {dtype} tensor of shape {shape}",
                "write to the tensor itself, not to a contiguous copy of it",
            )


@tensors
def writes_keep_the_memory(s: Subject) -> None:
    """After writes the tensor lies where it lay: tensors that share its memory see them."""
    shape = (3, 4)
    value = s.probe.make(s.dtype, shape, content(s.dtype, shape))
    other = s.probe.tied(value)
    before = s.tensors.storage_key(s.shard(value))
    new = content(s.dtype, shape, 1)
    s.put(value, new)
    after = s.tensors.storage_key(s.shard(value))
    expect(
        before == after,
        "a write keeps the tensor's memory, and so its storage_key",
        f"{before}, then {after}",
        "write into the memory that is there, do not replace it",
    )
    if other is not None:
        s.same(other, new, "a tied tensor sees the write", "write into the memory that is there, do not replace it")


@tensors
def views_are_written_through_numpy(s: Subject) -> None:
    """`writable` views, where given, are writeable numpy arrays of the carrier, in the shard's shape."""
    for dtype, shape, data in s.cases():
        view = s.tensors.writable(s.shard(s.probe.make(dtype, shape, data)))
        if view is None:
            continue
        got = (isinstance(view, np.ndarray), view.flags.writeable, view.shape, view.dtype)
        wanted = (True, True, shape, dtype_of(dtype).carrier)
        expect(
            got == wanted,
            f"writable gives (numpy array, writeable, shape, dtype) = {wanted}",
            f"{got}",
            "return the same array as host_view, writeable",
        )


@tensors
def overlapping_tensors_are_no_targets(s: Subject) -> None:
    """`writable` raises TargetError for a tensor of which several elements are the same memory."""
    value = s.probe.overlapping(s.dtype, (3, 4))
    if value is None:
        raise NotApplicable("the framework has no tensors that overlap themselves (PlatformProbe.overlapping)")
    try:
        s.tensors.writable(s.shard(value))
    except TargetError:
        return
    fail(
        "writable raises TargetError where several elements are the same memory",
        "it raised nothing",
        "see hyper_ckpt.builtin.numpy_tensors.overlaps_itself; also where writable gives None",
    )
