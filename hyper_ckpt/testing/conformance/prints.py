"""What `Tensors` promises of fingerprints and storage keys."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from hyper_ckpt.contracts.platform import WHOLE_FINGERPRINT_BYTES, LocalShard
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.testing.conformance.check import NotApplicable, Part, expect
from hyper_ckpt.testing.conformance.subject import LARGE, SHAPES, STRIDED_SHAPES, Subject, content

prints = Part("tensors")


def _print(s: Subject, value: object) -> bytes:
    return s.tensors.fingerprint(s.tensors.local_shards(value))


@prints
def fingerprints_are_8_bytes(s: Subject) -> None:
    """A fingerprint is 8 bytes, for every dtype and shape, an empty one included."""
    for dtype, shape, data in s.cases():
        got: Any = _print(s, s.probe.make(dtype, shape, data))
        expect(
            isinstance(got, bytes) and len(got) == 8,
            f"8 bytes for a {dtype} tensor of shape {shape}",
            f"{got!r}",
            "use hyper_ckpt.contracts.platform.sampled_fingerprint",
        )


@prints
def fingerprints_of_equal_contents_are_equal(s: Subject) -> None:
    """Two tensors with equal contents have one fingerprint, below and above 1 MiB."""
    for dtype, shape in ((s.dtype, (3, 4)), (s.wide, LARGE)):
        data = content(dtype, shape)
        one, two = (_print(s, s.probe.make(dtype, shape, data)) for _ in range(2))
        expect(
            one == two,
            f"equal {dtype} tensors of shape {shape} have one fingerprint",
            f"{one.hex()} and {two.hex()}",
            "look at the contents only: no addresses, times or random numbers",
        )


@prints
def fingerprints_see_every_byte_of_small_tensors(s: Subject) -> None:
    """Below 1 MiB any byte that differs changes the fingerprint."""
    itemsize = dtype_of(s.dtype).itemsize
    for count in (1, 5, WHOLE_FINGERPRINT_BYTES // itemsize - 1):
        data = content(s.dtype, (count,))
        one = _print(s, s.probe.make(s.dtype, (count,), data))
        step = max(len(data) // 13, 1)
        for at in {0, *range(step // 2, len(data), step), len(data) - 1}:
            changed = bytearray(data)
            changed[at] ^= 1
            expect(
                one != _print(s, s.probe.make(s.dtype, (count,), bytes(changed))),
                "below 1 MiB any byte that differs changes the fingerprint",
                f"byte {at:,} of {len(data):,} does not",
                "below WHOLE_FINGERPRINT_BYTES look at all bytes",
            )


@prints
def fingerprints_of_large_tensors_look_at_the_contents(s: Subject) -> None:
    """Above 1 MiB a tensor whose elements all differ has another fingerprint, and so has one that is reversed."""
    data = content(s.wide, LARGE)
    itemsize = dtype_of(s.wide).itemsize
    elements = [data[i : i + itemsize] for i in range(0, len(data), itemsize)]
    all_three = [data, content(s.wide, LARGE, 1), b"".join(reversed(elements))]
    seen = {_print(s, s.probe.make(s.wide, LARGE, each)) for each in all_three}
    expect(
        len(seen) == 3,
        "above 1 MiB tensors that differ everywhere have different fingerprints",
        f"{len(seen)} fingerprints for 3 tensors",
        "sample the tensor evenly, in order",
    )


@prints
def fingerprints_ignore_strides(s: Subject) -> None:
    """A strided tensor and its contiguous copy have one fingerprint, below and above 1 MiB."""
    for dtype, shape in (*((s.dtype, shape) for shape in STRIDED_SHAPES), (s.wide, LARGE)):
        data = content(dtype, shape)
        strided, plain = s.strided(dtype, shape, data), s.probe.make(dtype, shape, data)
        one, two = _print(s, strided), _print(s, plain)
        expect(
            one == two,
            f"a strided {dtype} tensor of shape {shape} has the fingerprint of its copy",
            f"{one.hex()} and {two.hex()}",
            "go through the elements in row-major order, however they lie",
        )


@prints
def fingerprints_look_at_every_shard(s: Subject) -> None:
    """Where a tensor has several shards on a rank, a change in any of them changes the fingerprint."""
    shape = (3, 4)
    parts = [s.shard(s.probe.make(s.dtype, shape, content(s.dtype, shape, seed))) for seed in range(4)]

    def of(*seeds: int) -> bytes:
        shards = [LocalShard((3 * at, 0), parts[seed].sizes, parts[seed].data) for at, seed in enumerate(seeds)]
        return s.tensors.fingerprint(shards)

    seen = {of(*seeds) for seeds in ((0, 1, 2), (3, 1, 2), (0, 3, 2), (0, 1, 3), (1, 0, 2))}
    expect(
        len(seen) == 5,
        "5 tensors of 3 shards each, every two with other contents in some shard, have 5 fingerprints",
        f"{len(seen)}",
        "go through all shards, in order: a ShardedTensor of your tensors may have several",
    )


def _key(s: Subject, value: object) -> object:
    return s.tensors.storage_key(s.shard(value))


@prints
def storage_keys_of_tied_tensors_are_equal(s: Subject) -> None:
    """Two tensors over the same elements of the same memory have equal, hashable keys, each time."""
    value = s.probe.make(s.dtype, (3, 4), content(s.dtype, (3, 4)))
    tied = s.probe.tied(value)
    keys = {_key(s, value), _key(s, value)} | ({_key(s, tied)} if tied is not None else set())
    expect(
        len(keys) == 1 and None not in keys,
        "tensors over one memory have one storage_key, not None",
        f"{keys}",
        "build it of address, shape, strides and dtype of the memory, not of the object",
    )


@prints
def storage_keys_of_other_memory_differ(s: Subject) -> None:
    """Tensors in memory of their own have keys of their own."""
    data = content(s.dtype, (3, 4))
    values = [s.probe.make(s.dtype, (3, 4), data) for _ in range(5)]
    keys = {_key(s, value) for value in values}
    expect(
        len(keys) == len(values),
        f"{len(values)} tensors have {len(values)} storage keys",
        f"{len(keys)}",
        "the key must tell the memory, and contents say nothing of it",
    )


@prints
def storage_keys_of_other_elements_differ(s: Subject) -> None:
    """Tensors over one memory that show other elements, or as another dtype, have other keys."""
    shape = (4, 4)
    value = s.probe.make(s.dtype, shape, content(s.dtype, shape))
    pairs = s.probe.views(value)
    if not pairs:
        raise NotApplicable("the framework has no two views of one memory (PlatformProbe.views)")
    for number, (one, other) in enumerate(pairs):
        keys = [_key(s, one), _key(s, other)]
        expect(
            keys[0] != keys[1],
            f"the tensors of pair {number} of PlatformProbe.views have two storage keys",
            f"both have {keys[0]}",
            "shape, offset, strides and dtype belong to the key (hyper_ckpt.builtin.numpy_tensors.memory_key): tensors "
            "with one key are stored once, so the other one is lost in silence",
        )


@prints
def storage_keys_of_empty_tensors_are_none(s: Subject) -> None:
    """A tensor without elements has no key: it shares memory with nothing."""
    for shape in SHAPES:
        if 0 not in shape:
            continue
        key = _key(s, s.probe.make(s.dtype, shape, b""))
        expect(key is None, f"storage_key is None for shape {shape}", f"{key}", "return None for an empty shard")


@prints
def equal_signatures_mean_equal_answers(s: Subject) -> None:
    """Tensors of one signature are described alike, are the same memory, and have it again, with other contents too."""
    shapes: tuple[tuple[int, ...], ...] = ((), (4,), (2, 2), (4, 1), (1, 4), (4, 4), (0, 4), (4, 0))
    values = [s.probe.make(d, shape, content(d, shape)) for d in s.probe.dtypes for shape in shapes]
    values += [s.probe.make(s.dtype, (4, 4), content(s.dtype, (4, 4))) for _ in range(2)]
    values += [each for pair in s.probe.views(values[-1]) for each in pair]
    tied = s.probe.tied(values[-1])
    values += [tied] if tied is not None else []
    answers: dict[Hashable, object] = {}
    for value in values:
        signature = s.tensors.signature(value)
        expect(
            s.tensors.signature(value) == signature,
            "a tensor has one signature",
            f"{signature}, then {s.tensors.signature(value)}",
            "leave out of it what is not the tensor's own, or inherit the one that is None",
        )
        if signature is None:
            continue
        shards = s.tensors.local_shards(value)
        answer = (
            s.tensors.describe(value),
            [(shard.offsets, shard.sizes, s.tensors.storage_key(shard)) for shard in shards],
        )
        expect(
            answers.setdefault(signature, answer) == answer,
            "tensors of one signature are described alike and are one memory",
            f"{answers[signature]} and {answer}, both of signature {signature}",
            "put into it all that describe, local_shards and storage_key look at: a state that changed would be taken "
            "for the one that was saved before",
        )
    if not answers:
        raise NotApplicable("signatures are unknown (the inherited Tensors.signature)")
