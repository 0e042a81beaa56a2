"""Saves and loads on N ranks: together, sharded, and where one rank fails or does not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hyper_ckpt import load, read, read_metadata, save
from hyper_ckpt.contracts.platform import LocalShard
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.errors import CheckpointError, CheckpointNotFoundError, RankTimeoutError
from hyper_ckpt.layout import Replicated
from hyper_ckpt.testing.conformance.check import NotApplicable, Part, expect
from hyper_ckpt.testing.conformance.ranks import wait_for
from hyper_ckpt.testing.conformance.subject import Shape, Subject, content, copied_out, same_bytes, size_of

world_saves = Part("world")

SILENCE_SECONDS = 3.0
_SHARDED: tuple[Shape, ...] = ((10, 3), (5,), (2, 7), (1, 4))  # do not divide evenly by 4, nor by 3
_SEE = "the other checks say which part of the platform is wrong; if they pass, report a bug"


def _state(s: Subject, seed: int = 0) -> dict[str, Any]:
    shape = (4, 5)
    own = content(s.dtype, shape, seed + 10 + s.ranks.rank)
    return {
        "everywhere": s.probe.make(s.dtype, shape, content(s.dtype, shape, seed)),
        f"of rank {s.ranks.rank}": s.probe.make(s.dtype, shape, own),
    }


def _save_and_load(s: Subject, where: Path) -> None:
    save(_state(s), where, platform=s.platform, timeout=s.timeout)
    target = _state(s, seed=1)
    load(dict(target), where, platform=s.platform, timeout=s.timeout)
    for name, value in target.items():
        wanted = s.probe.raw(_state(s)[name])
        s.same(value, wanted, f"rank {s.ranks.rank} loads {name!r} as it was saved", _SEE)


@world_saves
def all_ranks_save_and_load(s: Subject) -> None:
    """A state of shared and of own tensors is saved by all ranks and loaded by all."""
    where = s.folder / "ckpt"
    _save_and_load(s, where)
    found = read(where)
    for rank in range(s.ranks.world_size):
        data = content(s.dtype, (4, 5), 10 + rank)
        same_bytes(np.ascontiguousarray(found[f"of rank {rank}"]).tobytes(), data, f"rank {rank}'s tensor", _SEE)


def _sharded(s: Subject, shape: Shape, data: bytes) -> Any:
    value = s.probe.sharded(s.dtype, shape, data, s.ranks.rank, s.ranks.world_size)
    if value is None:
        raise NotApplicable("the framework has no sharded tensors (PlatformProbe.sharded)")
    return value


def _cut(dtype: str, shape: Shape, data: bytes, shard: LocalShard) -> bytes:
    whole = np.frombuffer(data, dtype_of(dtype).carrier).reshape(shape)
    box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))
    return np.ascontiguousarray(whole[box]).tobytes()


@world_saves
def sharded_tensors_say_where_they_lie(s: Subject) -> None:
    """The local shards of a sharded tensor lie where the framework put those elements, and cover all of it."""
    for shape in _SHARDED:
        data = content(s.dtype, shape)
        value = _sharded(s, shape, data)
        got = s.tensors.describe(value)
        said = got is not None and (got.dtype, got.shape) == (s.dtype, shape) and got.layout != Replicated()
        expect(said, f"a sharded tensor has the global shape {shape}, and a layout", f"{got}", "see Tensors.describe")
        shards = s.tensors.local_shards(value)
        mine = b"".join(_cut(s.dtype, shape, data, shard) for shard in shards)
        same_bytes(s.probe.local_raw(value), mine, f"the boxes of rank {s.ranks.rank}", "see Tensors.local_shards")
        for shard in shards:
            staged = copied_out(s.stager, shard, size_of(shard, s.dtype))
            same_bytes(staged, _cut(s.dtype, shape, data, shard), "copy_out of a shard", "see Stager.copy_out")
        covered = np.zeros(shape, np.int64)
        for boxes in s.ranks.all_gather_object([(sh.offsets, sh.sizes) for sh in shards]):
            for offsets, sizes in boxes:
                covered[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        expect(bool(covered.all()), "all ranks' boxes cover the tensor", f"{covered.tolist()}", "see local_shards")


@world_saves
def sharded_tensors_survive(s: Subject) -> None:
    """Sharded tensors are saved, read whole elsewhere, and loaded into sharded ones."""
    contents = {f"{shape}": (shape, content(s.dtype, shape)) for shape in _SHARDED}
    where = s.folder / "ckpt"
    save({n: _sharded(s, *each) for n, each in contents.items()}, where, platform=s.platform, timeout=s.timeout)
    found = read(where)
    for name, (shape, data) in contents.items():
        expect(found[name].shape == shape, f"{name} is read whole", f"{found[name].shape}", _SEE)
        same_bytes(np.ascontiguousarray(found[name]).tobytes(), data, f"{name} is stored whole", _SEE)
    target = {n: _sharded(s, shape, content(s.dtype, shape, 1)) for n, (shape, _) in contents.items()}
    load(dict(target), where, platform=s.platform, timeout=s.timeout)
    for name, (shape, data) in contents.items():
        wanted = s.probe.local_raw(_sharded(s, shape, data))
        same_bytes(s.probe.local_raw(target[name]), wanted, f"rank {s.ranks.rank}'s part of {name} is loaded", _SEE)


@world_saves
def empty_like_a_sharded_tensor(s: Subject) -> None:
    """`empty(description, like=sharded)` makes a tensor that lies over the ranks as `like` does."""
    shape = _SHARDED[0]
    like = _sharded(s, shape, content(s.dtype, shape))
    wanted = s.tensors.describe(like)
    assert wanted is not None
    made = s.tensors.empty(wanted, like)
    expect(s.tensors.describe(made) == wanted, f"{wanted}", f"{s.tensors.describe(made)}", "see Tensors.empty")
    boxes = [[(sh.offsets, sh.sizes) for sh in s.tensors.local_shards(each)] for each in (like, made)]
    expect(boxes[0] == boxes[1], f"the boxes of `like`: {boxes[0]}", f"{boxes[1]}", "copy the distribution of `like`")


def _error_of(call: Any) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _nothing_there(where: Path) -> None:
    error = _error_of(lambda: read_metadata(where))
    missing = isinstance(error, CheckpointNotFoundError)
    expect(missing, "nothing is published by a save that failed", f"a checkpoint ({error!r})", _SEE)


@world_saves
def a_rank_that_fails_is_named(s: Subject) -> None:
    """Where one rank's state cannot be saved, all ranks raise, name it, publish nothing, and go on in step."""
    failing = s.ranks.world_size - 1
    state = _state(s) | ({"wrong": object()} if s.ranks.rank == failing else {})
    where = s.folder / "failed"
    error = _error_of(lambda: save(state, where, platform=s.platform, timeout=s.timeout))
    expect(
        isinstance(error, CheckpointError) and f"rank {failing}" in str(error) and "wrong" in str(error),
        f"the error of rank {failing} on every rank, with its number",
        f"{type(error).__name__} on rank {s.ranks.rank}: {error}",
        "see Mailbox: it carries the news of failures",
    )
    s.ranks.all_gather_object(None)
    _nothing_there(where)
    _save_and_load(s, s.folder / "next")


@world_saves
def a_silent_rank_is_named(s: Subject) -> None:
    """Where one rank does not call, the others raise RankTimeoutError after their timeout, name it, publish nothing."""
    silent = s.ranks.world_size - 1
    where = s.folder / "failed"
    s.ranks.all_gather_object(None)  # so that nobody else is late
    try:
        if s.ranks.rank != silent:
            error = _error_of(lambda: save(_state(s), where, platform=s.platform, timeout=SILENCE_SECONDS))
            expect(
                isinstance(error, RankTimeoutError) and error.ranks == (silent,),
                f"a RankTimeoutError that names rank {silent}, {SILENCE_SECONDS:g} s after the call",
                f"{type(error).__name__} on rank {s.ranks.rank}: {error}",
                "no call on the mailbox, and nothing before the ranks have met there, may wait for another rank",
            )
    finally:
        s.ranks.mailbox.set(f"silent/{s.ranks.rank}", b"done")
    # The silent rank stays: with its process it would be a dead one, and may host what the others need.
    for rank in range(s.ranks.world_size):
        wait_for(s, f"silent/{rank}")
    _nothing_there(where)


@world_saves.spoiling
def collectives_fail_in_time(s: Subject) -> None:
    """A collective whose peers do not come raises, `Ranks.timeout` seconds after the call or sooner."""
    if s.ranks.rank == s.ranks.world_size - 1:
        return
    s.ranks.timeout = SILENCE_SECONDS
    error = _error_of(lambda: s.ranks.all_gather_object(s.ranks.rank))
    expect(error is not None, "a collective that cannot complete raises", "it returned", "obey Ranks.timeout")
