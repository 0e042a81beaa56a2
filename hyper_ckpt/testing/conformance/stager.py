"""What `Stager` promises: buffers, copies, and their order against the framework's own work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer
from hyper_ckpt.testing.conformance.check import Part, expect
from hyper_ckpt.testing.conformance.subject import LARGE, STRIDED_SHAPES, Subject, blank, content, filled, same_bytes

stager = Part("stager")

_SIZES = (0, 1, 4095, 4097, 1 << 20, (5 << 20) + 3)
_ORDER = "order the copy behind the work queued on the caller's stream, and the caller's stream behind copy_in"


@stager
def buffers_are_large_enough(s: Subject) -> None:
    """`buffer(n)` is a writeable, contiguous, one-dimensional uint8 array of at least n bytes."""
    for nbytes in _SIZES:
        buffer: Any = s.stager.buffer(nbytes)
        fine = isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 and buffer.ndim == 1
        expect(
            fine and buffer.nbytes >= nbytes and buffer.flags.c_contiguous and buffer.flags.writeable,
            f"buffer({nbytes}) is a writeable contiguous uint8 array of at least {nbytes} bytes",
            f"{type(buffer).__name__} of {getattr(buffer, 'dtype', '?')}, shape {getattr(buffer, 'shape', '?')}",
            "see hyper_ckpt.builtin.host_stager.BufferPool",
        )
        s.stager.release(buffer)


@stager
def buffers_in_use_are_apart(s: Subject) -> None:
    """Buffers in use share no memory, also after others were given back."""
    held: list[tuple[ByteBuffer, int]] = []
    for number in range(40):
        buffer = s.stager.buffer(5000 + number % 3)
        buffer[:] = number
        held.append((buffer, number))
        if number % 3 == 2:
            s.stager.release(held.pop(0)[0])
    broken = [number for buffer, number in held if not (buffer == number).all()]
    expect(not broken, "buffers in use share no memory", f"overwritten: {broken}", "hand each buffer to one user")
    for buffer, _ in held:
        s.stager.release(buffer)


@stager
def released_buffers_are_reused(s: Subject) -> None:
    """A buffer that was given back serves again: memory does not grow from one save to the next."""
    seen: list[ByteBuffer] = []  # kept, so that no address can come back by chance
    for _ in range(8):
        seen.append(s.stager.buffer(1 << 20))
        s.stager.release(seen[-1])
    addresses = {buffer.__array_interface__["data"][0] for buffer in seen}
    expect(
        len(addresses) < len(seen),
        "released buffers are reused",
        f"{len(seen)} buffers one after another lie at {len(addresses)} addresses",
        "keep released buffers in a pool (hyper_ckpt.builtin.host_stager.BufferPool)",
    )


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(number)` in threads at once; raises what the first of them raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@stager
def buffers_from_several_threads(s: Subject) -> None:
    """`buffer` and `release` may be called from any thread, by several at once."""

    def work(number: int) -> None:
        for turn in range(60):
            buffer = s.stager.buffer(3000 + 1000 * (turn % 3))
            buffer[:] = number
            time.sleep(0)  # lets another thread run
            same = bool((buffer == number).all())
            expect(same, "a buffer belongs to one thread", "another thread wrote to it", "guard the pool with a lock")
            s.stager.release(buffer)

    _in_threads(6, work)


@stager
def copy_out_gives_the_bytes(s: Subject) -> None:
    """`copy_out` puts the tensor's bytes, row-major, at the start of the buffer."""
    for dtype, shape, data in s.cases():
        got = s.copied_out(s.probe.make(dtype, shape, data), len(data))
        same_bytes(got, data, f"copy_out of a {dtype} tensor of shape {shape}", "copy elements in row-major order")


@stager
def copy_out_of_strided_tensors(s: Subject) -> None:
    """`copy_out` of a strided tensor gives its elements in row-major order, not its memory."""
    for dtype in s.probe.dtypes:
        for shape in STRIDED_SHAPES:
            data = content(dtype, shape)
            got = s.copied_out(s.strided(dtype, shape, data), len(data))
            same_bytes(got, data, f"copy_out of a strided {dtype} tensor of {shape}", "go by strides")


@stager
def copy_in_sets_the_tensor(s: Subject) -> None:
    """`copy_in` sets every element of the tensor from row-major bytes."""
    for dtype, shape, data in s.cases():
        value, new = s.probe.make(dtype, shape, data), content(dtype, shape, 1)
        s.copy_in(value, new)
        s.same(value, new, f"copy_in sets a {dtype} tensor of shape {shape}", "write to the tensor itself")


@stager
def copy_in_to_strided_tensors(s: Subject) -> None:
    """`copy_in` to a strided tensor arrives in it: on some frameworks a write through a view is lost."""
    for dtype in s.probe.dtypes:
        for shape in STRIDED_SHAPES:
            value, new = s.strided(dtype, shape, content(dtype, shape)), content(dtype, shape, 1)
            s.copy_in(value, new)
            s.same(value, new, f"copy_in sets a strided {dtype} tensor of {shape}", "write to the tensor itself")


@stager
def copy_out_follows_earlier_work(s: Subject) -> None:
    """`copy_out` sees what was queued on the caller's stream before it, without being told to wait."""
    value = s.probe.make(s.wide, LARGE, content(s.wide, LARGE))
    for seed in range(1, 5):
        new = content(s.wide, LARGE, seed)
        s.probe.overwrite(value, new)
        got = s.copied_out(value, len(new))
        same_bytes(got, new, "copy_out gives what was written before it", _ORDER)


@stager
def copy_out_is_complete_after_wait(s: Subject) -> None:
    """Once waited for, a `copy_out` stays what it was, whatever is written to the tensor later."""
    data = content(s.wide, LARGE)
    value = s.probe.make(s.wide, LARGE, data)
    buffer = blank(s.stager, len(data))
    s.stager.copy_out(s.shard(value), buffer).wait()
    got = buffer[: len(data)].tobytes()
    s.probe.overwrite(value, content(s.wide, LARGE, 1))
    s.probe.raw(value)
    same_bytes(got, data, "wait returns when the copy is complete", "wait for the copy's own event")
    same_bytes(buffer[: len(data)].tobytes(), data, "the buffer is a copy of its own", "copy, do not alias the tensor")
    s.stager.release(buffer)


@stager
def a_buffer_in_use_is_left_alone(s: Subject) -> None:
    """A buffer keeps its bytes until it is released, through later copies of other tensors."""
    data = content(s.wide, LARGE)
    value = s.probe.make(s.wide, LARGE, data)
    buffer = blank(s.stager, len(data))
    s.stager.copy_out(s.shard(value), buffer).wait()
    for seed in range(1, 4):
        new = content(s.wide, LARGE, seed)
        other = s.probe.make(s.wide, LARGE, new)
        s.copied_out(other, len(new))
        s.copy_in(other, new)
    got = buffer[: len(data)].tobytes()
    same_bytes(got, data, "a buffer in use is left alone", "give each copy the buffer that it was called with only")
    s.stager.release(buffer)


@stager
def copy_in_follows_earlier_work(s: Subject) -> None:
    """`copy_in` comes after what was queued before it: an earlier write cannot overtake it."""
    value = s.probe.make(s.wide, LARGE, content(s.wide, LARGE))
    for seed in range(1, 5):
        s.probe.overwrite(value, content(s.wide, LARGE, seed))
        new = content(s.wide, LARGE, 10 + seed)
        s.copy_in(value, new)
        s.same(value, new, "copy_in comes after earlier writes", _ORDER)


@stager
def later_work_follows_copy_in(s: Subject) -> None:
    """Work that the caller queues after `copy_in`, without waiting, comes after it."""
    value = s.probe.make(s.wide, LARGE, content(s.wide, LARGE))
    for seed in range(1, 5):
        buffer = filled(s.stager, content(s.wide, LARGE, seed))
        pending = s.stager.copy_in(buffer, s.shard(value))
        new = content(s.wide, LARGE, 10 + seed)
        s.probe.overwrite(value, new)
        s.same(value, new, "a write after copy_in comes after it", _ORDER)
        pending.wait()
        s.stager.release(buffer)
        s.same(value, new, "a copy_in that was waited for does nothing any more", _ORDER)


@stager
def several_copies_in_flight(s: Subject) -> None:
    """Several copies may be started before any is waited for, and waited for in any order."""
    shape = (300, 100)
    data = [content(s.dtype, shape, seed) for seed in range(6)]
    values = [s.probe.make(s.dtype, shape, each) for each in data]
    buffers = [blank(s.stager, len(each)) for each in data]
    pending = [s.stager.copy_out(s.shard(v), b) for v, b in zip(values, buffers, strict=True)]
    for each in reversed(pending):
        each.wait()
    for buffer, wanted in zip(buffers, data, strict=True):
        same_bytes(buffer[: len(wanted)].tobytes(), wanted, "each copy_out fills its own buffer", _ORDER)
    pending = [s.stager.copy_in(b, s.shard(v)) for v, b in zip(reversed(values), buffers, strict=True)]
    for each in reversed(pending):
        each.wait()
    for value, wanted in zip(reversed(values), data, strict=True):
        s.same(value, wanted, "each copy_in sets its own tensor", _ORDER)
    for buffer in buffers:
        s.stager.release(buffer)


@stager
def waiting_in_another_thread(s: Subject) -> None:
    """A copy that one thread started may be waited for in another one."""
    data = content(s.wide, LARGE)
    value = s.probe.make(s.wide, LARGE, data)
    buffers = [blank(s.stager, len(data)) for _ in range(3)]
    pending: list[Any] = [s.stager.copy_out(s.shard(value), buffer) for buffer in buffers]

    def work(number: int) -> None:
        pending[number].wait()
        got = buffers[number][: len(data)].tobytes()
        same_bytes(got, data, "wait in another thread returns when the copy is complete", "wait for an event")
        s.stager.release(buffers[number])

    _in_threads(len(buffers), work)
