"""What `Tensors` promises of `plain`: one call that says what several others would."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hyper_ckpt.contracts.platform import HostTensor
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.errors import CheckpointError
from hyper_ckpt.host_memory import address_of, bytes_at
from hyper_ckpt.testing.conformance.check import NotApplicable, Part, expect
from hyper_ckpt.testing.conformance.subject import SHAPES, STRIDED_SHAPES, Subject, content

plain = Part("tensors")

_NOT_SO_SIMPLE = (
    "return None for whatever is empty, strided, on a device or without memory of its own that may be written"
)


@plain
def plain_tensors_are_what_the_others_say(s: Subject) -> None:
    """Where `plain` gives an answer, `describe`, `local_shards` and `writable` say the same, and the tensor lies in one
    run. None is an answer to everything."""
    found = 0
    for what, value in _values(s):
        got = s.tensors.plain(value)
        if got is None:
            continue
        found += 1
        seen, promised = _as_the_others_say(s, value), f"plain of {what} is None, or what the others say"
        expect(seen is not None, promised, f"{got}, of what is not so simple", _NOT_SO_SIMPLE)
        expect(got == seen, promised, f"{got}, where they say {seen}", "correct Tensors.plain, or inherit it")
    if not found:
        raise NotApplicable("no tensor of this platform is plain (the inherited Tensors.plain)")


@plain
def plain_tensors_are_changed_by_writes(s: Subject) -> None:
    """What is written at the address of a plain tensor, after `before_writes`, is in the tensor."""
    data, other = content(s.dtype, (3, 4)), content(s.dtype, (3, 4), seed=1)
    value = s.probe.make(s.dtype, (3, 4), data)
    got = s.tensors.plain(value)
    if got is None:
        raise NotApplicable("tensors of this platform are not plain")
    s.tensors.before_writes([value])
    bytes_at(got.address, got.nbytes)[:] = other
    s.same(value, other, "writes at the address change the tensor", "give the address of its own memory, not of a copy")
    again = s.tensors.plain(value)
    expect(again == got, "a write keeps the tensor's memory", f"{got}, then {again}", "leave the memory where it is")


def _values(s: Subject) -> Iterator[tuple[str, Any]]:
    """Tensors of all kinds that the probe can make, and one that is none."""
    for dtype in s.probe.dtypes:
        for shape in SHAPES:
            yield f"a {dtype} tensor of shape {shape}", s.probe.make(dtype, shape, content(dtype, shape))
        for shape in STRIDED_SHAPES:
            yield f"a strided {dtype} tensor", s.probe.strided(dtype, shape, content(dtype, shape))
    square = s.probe.make(s.dtype, (4, 4), content(s.dtype, (4, 4)))
    for each in (view for pair in s.probe.views(square) for view in pair):
        yield "a view", each
    yield "a tied tensor", s.probe.tied(square)
    yield "a tensor of which elements share memory", s.probe.overlapping(s.dtype, (3, 4))
    yield "a tensor without memory", s.probe.meta(s.dtype, (3, 4))
    yield "a string", "w"


def _as_the_others_say(s: Subject, value: Any) -> HostTensor | None:
    """What `plain` may say; None: only None."""
    try:
        description, views = s.tensors.describe(value), []
        if description is not None and description.has_memory:
            views = [s.tensors.writable(shard) for shard in s.tensors.local_shards(value)]
    except CheckpointError:
        return None
    (view,) = views if len(views) == 1 else (None,)
    if description is None or view is None or not view.size or not view.flags.c_contiguous:
        return None
    nbytes = math.prod(description.shape) * dtype_of(description.dtype).itemsize
    return HostTensor(description, address_of(view), nbytes) if nbytes == view.nbytes else None
