"""What `Tensors` promises of sharded tensors, and how they are saved and loaded by N ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_ckpt import load, read, save
from hyper_ckpt.contracts.platform import LocalShard
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.errors import UnsupportedStateError
from hyper_ckpt.layout import Boxes, Layout, MeshLayout, expand
from hyper_ckpt.testing.conformance.check import NotApplicable, Part, expect, fail
from hyper_ckpt.testing.conformance.subject import Shape, Subject, content, copied_out, same_bytes, size_of

sharded = Part("world")

# By 4 and by 3 they divide unevenly, some into fewer pieces than ranks. Pieces of ceil(n / ranks) and fair ones differ:
# of 13 by 4 those are 4, 4, 4, 1 and these 4, 3, 3, 3.
_SHARDED: tuple[Shape, ...] = ((10, 3), (5,), (13, 11), (9,), (2, 7), (1, 4))
_SEE = "the other checks say which part of the platform is wrong; if they pass, report a bug"
Box = tuple[tuple[int, ...], tuple[int, ...]]


def _every_sharded(s: Subject, shape: Shape, data: bytes) -> list[Any]:
    """The tensor in every sharding of the probe."""
    where = (s.dtype, shape, data, s.ranks.rank, s.ranks.world_size)
    value = s.probe.sharded(*where)
    if value is None:
        raise NotApplicable("the framework has no sharded tensors (PlatformProbe.sharded)")
    return [value, *s.probe.more_sharded(*where)]


def _cut(dtype: str, shape: Shape, data: bytes, shard: LocalShard) -> bytes:
    whole = np.frombuffer(data, dtype_of(dtype).carrier).reshape(shape)
    box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))
    return np.ascontiguousarray(whole[box]).tobytes()


def _boxes_of(shape: Shape, layout: Layout, rank: int) -> list[Box]:
    """What a layout puts on a rank."""
    if isinstance(layout, Boxes):
        return list(layout.boxes)
    if not isinstance(layout, MeshLayout):
        return [((0,) * len(shape), shape)]
    if rank not in layout.mesh.ranks:
        return []
    at = np.unravel_index(layout.mesh.ranks.index(rank), layout.mesh.shape) if layout.mesh.shape else ()
    coordinate = np.array(at, np.int64).reshape(-1, 1)
    offsets, sizes = expand(shape, layout.mesh.shape, layout.placements, layout.order, coordinate)
    return [(tuple(offsets[0].tolist()), tuple(sizes[0].tolist()))]


def _filled(boxes: Sequence[Box]) -> list[Box]:
    return [(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes if 0 not in sizes]


def _check_place(s: Subject, shape: Shape, data: bytes, value: Any, number: int) -> None:
    what = f"sharding {number} of shape {shape} on rank {s.ranks.rank}"
    got = s.tensors.describe(value)
    said = got is not None and (got.dtype, got.shape) == (s.dtype, shape)
    expect(said, f"{what}: describe gives {s.dtype} and the global shape", f"{got}", "see Tensors.describe")
    assert got is not None
    shards = s.tensors.local_shards(value)
    wanted = _filled(_boxes_of(shape, got.layout, s.ranks.rank))
    boxes = _filled([(shard.offsets, shard.sizes) for shard in shards])
    expect(
        wanted == boxes,
        f"{what}: local_shards has the boxes that the layout of describe means",
        f"the layout puts (offsets, sizes) {wanted} here, local_shards says {boxes}; the layout is {got.layout}",
        "check Mesh.ranks (row-major, this platform's numbers), MeshLayout.order and Shard.sizes; None means pieces of "
        "ceil(length / n)",
    )
    mine = b"".join(_cut(s.dtype, shape, data, shard) for shard in shards)
    same_bytes(s.probe.local_raw(value), mine, f"{what}: the framework's own part is in the boxes", _PART)
    for shard in shards:
        staged = copied_out(s.stager, shard, size_of(shard, s.dtype))
        same_bytes(staged, _cut(s.dtype, shape, data, shard), f"{what}: copy_out of a shard", "see Stager.copy_out")
    covered = np.zeros(shape, np.int64)
    for each in s.ranks.all_gather_object(boxes):
        for offsets, sizes in each:
            covered[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    expect(bool(covered.all()), f"{what}: all ranks' boxes cover it", f"{covered.tolist()}", "see local_shards")


_PART = "the boxes must be those that the framework gives this rank: see Tensors.describe and local_shards"


@sharded
def sharded_tensors_say_where_they_lie(s: Subject) -> None:
    """The local shards of a sharded tensor are what its layout means, have the framework's elements, and cover it."""
    for shape in _SHARDED:
        data = content(s.dtype, shape)
        for number, value in enumerate(_every_sharded(s, shape, data)):
            _check_place(s, shape, data, value, number)


@sharded
def misshapen_parts_are_refused(s: Subject) -> None:
    """A part of another shape than the layout means is an UnsupportedLayoutError, in `describe` or `local_shards`."""
    shape = _SHARDED[0]
    value = s.probe.misshapen(s.dtype, shape, s.ranks.rank, s.ranks.world_size)
    if value is None:
        raise NotApplicable("the framework's parts have always the right shape (PlatformProbe.misshapen)")
    try:
        s.tensors.describe(value)
        shards = s.tensors.local_shards(value)
    except UnsupportedStateError:
        return
    boxes = [(shard.offsets, shard.sizes) for shard in shards]
    fail(
        "a part of another shape than its sharding means is an UnsupportedLayoutError",
        f"local_shards gives {boxes}",
        "compare the shape of what is here with the box that the layout means, in Tensors.local_shards",
    )


@sharded
def sharded_tensors_survive(s: Subject) -> None:
    """Sharded tensors are saved, read whole elsewhere, and loaded into sharded ones."""
    contents = {f"{shape}": (shape, content(s.dtype, shape)) for shape in _SHARDED}
    where = s.folder / "ckpt"
    saved = {n: _every_sharded(s, *each) for n, each in contents.items()}
    save(saved, where, platform=s.platform, timeout=s.timeout)
    found = read(where)
    for name, (shape, data) in contents.items():
        for each in found[name]:
            expect(each.shape == shape, f"{name} is read whole", f"{each.shape}", _SEE)
            same_bytes(np.ascontiguousarray(each).tobytes(), data, f"{name} is stored whole", _SEE)
    target = {n: _every_sharded(s, shape, content(s.dtype, shape, 1)) for n, (shape, _) in contents.items()}
    load({n: list(each) for n, each in target.items()}, where, platform=s.platform, timeout=s.timeout)
    for name, (shape, data) in contents.items():
        for got, wanted in zip(target[name], _every_sharded(s, shape, data), strict=True):
            own = s.probe.local_raw(wanted)
            same_bytes(s.probe.local_raw(got), own, f"rank {s.ranks.rank}'s part of {name} is loaded", _SEE)


@sharded
def empty_like_a_sharded_tensor(s: Subject) -> None:
    """`empty(description, like=sharded)` makes a tensor that lies over the ranks as `like` does."""
    shape = _SHARDED[0]
    for like in _every_sharded(s, shape, content(s.dtype, shape)):
        wanted = s.tensors.describe(like)
        assert wanted is not None
        made = s.tensors.empty(wanted, like)
        expect(s.tensors.describe(made) == wanted, f"{wanted}", f"{s.tensors.describe(made)}", "see Tensors.empty")
        boxes = [[(sh.offsets, sh.sizes) for sh in s.tensors.local_shards(each)] for each in (like, made)]
        expect(boxes[0] == boxes[1], f"the boxes of `like`: {boxes[0]}", f"{boxes[1]}", "as `like` lies over the ranks")
