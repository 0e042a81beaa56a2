"""Saves and loads on N ranks: together, and where one rank fails or does not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hyper_ckpt import load, read, read_metadata, save
from hyper_ckpt.errors import CheckpointError, CheckpointNotFoundError, RankTimeoutError
from hyper_ckpt.testing.conformance.check import NotApplicable, Part, expect
from hyper_ckpt.testing.conformance.ranks import need, wait_for
from hyper_ckpt.testing.conformance.subject import Subject, content, same_bytes
from hyper_ckpt.testing.conformance.tensors import described

world_saves = Part("world")

SILENCE_SECONDS = 3.0
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
    need(s, 2)
    expect(described(s, object()) is None, "describe gives None for an object()", "a tensor", "see describe")
    failing = s.ranks.world_size - 1
    state = _state(s) | ({"wrong": object()} if s.ranks.rank == failing else {})
    where = s.folder / "failed"
    error = _error_of(lambda: save(state, where, platform=s.platform, timeout=s.timeout))
    expect(
        isinstance(error, CheckpointError) and f"rank {failing}" in str(error) and "wrong" in str(error),
        f"the error of rank {failing} on every rank, with its number",
        f"{type(error).__name__} on rank {s.ranks.rank}: {error}",
        "see KeyValueStore: it carries the news of failures",
    )
    s.ranks.all_gather_object(None)
    _nothing_there(where)
    _save_and_load(s, s.folder / "next")


@world_saves
def a_silent_rank_is_named(s: Subject) -> None:
    """Where one rank does not call, the others raise RankTimeoutError after their timeout, name it, publish nothing."""
    need(s, 2)
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
                "no call but a `get` on the key-value store, and nothing before ranks meet there, may wait for another",
            )
    finally:
        s.ranks.key_value_store.set(f"silent/{s.ranks.rank}", b"done")
    # The silent rank stays: with its process it would be a dead one, and may host what the others need.
    for rank in range(s.ranks.world_size):
        wait_for(s, f"silent/{rank}")
    _nothing_there(where)


@world_saves.spoiling
def collectives_fail_in_time(s: Subject) -> None:
    """A collective whose peers do not come raises, `Ranks.timeout` (or `fixed_timeout`) seconds after the call or
    sooner."""
    need(s, 2)
    fixed = s.ranks.fixed_timeout
    if fixed is not None and fixed > s.timeout:
        raise NotApplicable(f"collectives fail after {fixed:g} s whatever is asked for: give the suite twice as long")
    if s.ranks.rank == s.ranks.world_size - 1:
        return
    s.ranks.timeout = SILENCE_SECONDS
    error = _error_of(lambda: s.ranks.all_gather_object(s.ranks.rank))
    expect(error is not None, "a collective that cannot complete raises", "it returned", "obey Ranks.timeout")
