"""A world of ranks as threads of one process, which notices what real ranks would hang on."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

from hyper_ckpt.builtin.numpy_platform import NumpyPlatform
from hyper_ckpt.contracts.platform import Platform, Ranks
from hyper_ckpt.testing.thread_ranks import ThreadRanks, ThreadWorld, WorldBrokenError
from hyper_ckpt.testing.time_scale import scaled

T = TypeVar("T")
PlatformFactory = Callable[[Ranks], Platform]


@overload
def run_world(
    world_size: int,
    fn: Callable[[Platform], T],
    *,
    timeout: float = ...,
    platform: PlatformFactory = ...,
    return_exceptions: Literal[False] = ...,
) -> list[T]: ...


@overload
def run_world(
    world_size: int,
    fn: Callable[[Platform], T],
    *,
    timeout: float = ...,
    platform: PlatformFactory = ...,
    return_exceptions: Literal[True],
) -> list[T | BaseException]: ...


def run_world(
    world_size: int,
    fn: Callable[[Platform], T],
    *,
    timeout: float = 60.0,
    platform: PlatformFactory = NumpyPlatform,
    return_exceptions: bool = False,
) -> list[T] | list[T | BaseException]:
    """Runs `fn(platform)` on every rank, each a thread with a platform of its own.

    An exception on one rank releases the others from whatever they wait in. Collectives out of step, or
    called outside the rank's own thread, are errors.

    Args:
        fn: gets the rank's Platform; its `ranks` is a `ThreadRanks`, which counts `traffic`.
        timeout: seconds for the whole world, on a quiet machine (see `time_scale`).
        platform: builds a rank's Platform from its Ranks.
        return_exceptions: return a rank's exception in place of its result.

    Returns:
        The ranks' results, in rank order.

    Raises:
        Exception: what the first failing rank raised, itself, with a note that names the rank.
        TimeoutError: ranks did not finish; names them and shows where they are. Their threads are abandoned.
    """
    world = ThreadWorld(world_size, time.monotonic() + scaled(timeout))
    outcomes: dict[int, T | BaseException] = {}
    failures: list[tuple[int, BaseException]] = []  # in the order in which ranks failed

    def rank_main(rank: int) -> None:
        try:
            outcomes[rank] = fn(platform(ThreadRanks(world, rank)))
        except BaseException as error:
            # First, so that a rank which fails because of this comes later in the list.
            failures.append((rank, error))
            outcomes[rank] = error
            world.abort(f"rank {rank} raised {type(error).__name__}: {error}")
        finally:
            world.leave(rank)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(world.deadline - time.monotonic(), 0))
    _refuse_unfinished(world, threads, scaled(timeout))
    if failures and not return_exceptions:
        raise _first_cause(failures, world_size)
    return [outcomes[rank] for rank in range(world_size)]


def _refuse_unfinished(world: ThreadWorld, threads: list[threading.Thread], timeout: float) -> None:
    stuck = [(rank, thread) for rank, thread in enumerate(threads) if thread.is_alive()]
    if not stuck:
        return
    frames = sys._current_frames()
    places = [
        f"rank {rank} is at:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for rank, thread in stuck
        if thread.ident in frames
    ]
    world.abort("the world's time is up")
    raise TimeoutError(f"ranks {[rank for rank, _ in stuck]} did not finish in {timeout} s\n" + "\n".join(places))


def _first_cause(failures: list[tuple[int, BaseException]], world_size: int) -> BaseException:
    """The first failure that isn't only the echo of another rank's."""
    rank, error = next(((r, e) for r, e in failures if not isinstance(e, WorldBrokenError)), failures[0])
    add_note: Callable[[str], Any] | None = getattr(error, "add_note", None)  # since Python 3.11
    if add_note is not None:
        add_note(f"raised on rank {rank} of {world_size}; failed: {sorted(r for r, _ in failures)}")
    return error
