"""SampleRanks over TCP: what the contract says, and what happens when a rank is gone."""

import gc
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from hyper_ckpt.errors import PlanError, RankFailedError, RankTimeoutError
from hyper_ckpt.testing.pool import PoolError
from hyper_ckpt.testing.processes import free_port
from hyper_ckpt_sample import framework, plugin
from hyper_ckpt_sample.framework import ProcessGroup
from hyper_ckpt_sample.platform import default
from hyper_ckpt_sample.ranks import SampleRanks


def meet(ranks: SampleRanks, name: str) -> None:
    """Waits in the key-value store until all ranks are here."""
    ranks.key_value_store.set(f"meet/{name}/{ranks.rank}", b"")
    deadline = time.monotonic() + 20
    for rank in range(ranks.world_size):
        while ranks.key_value_store.get(f"meet/{name}/{rank}") is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def objects(rank: int, world_size: int) -> bool:
    ranks = default().ranks
    assert (ranks.rank, ranks.world_size, plugin.active()) == (rank, world_size, world_size)
    assert ranks.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(world_size)]
    return ranks.all_gather_object(bytes([rank]) * (1 << 20) if rank == 1 else rank) == [0, b"\x01" * (1 << 20), 2, 3]


def test_objects_small_and_large(world):
    assert world(objects) == [True] * 4


def gather_and_scatter(rank: int, world_size: int, sizes: list[int]) -> tuple[object, bytes]:
    ranks = default().ranks
    gathered = ranks.gather_bytes(bytes([rank]) * sizes[rank])
    parts = [bytes([r]) * sizes[r] for r in range(world_size)] if rank == 0 else None
    if rank == 0:
        with pytest.raises(PlanError):
            ranks.scatter_bytes([b""])
    return gathered, ranks.scatter_bytes(parts)


@pytest.mark.parametrize("sizes", [[3, 0, 1 << 20, 1], [0, 0, 0, 0]])
def test_gather_and_scatter_of_unequal_parts(world, sizes):
    parts = [bytes([r]) * sizes[r] for r in range(4)]
    results = world(gather_and_scatter, sizes)
    assert [r[0] for r in results] == [parts, None, None, None]
    assert [r[1] for r in results] == parts


def broadcasts(rank: int, world_size: int) -> list[int]:
    ranks = default().ranks
    sets = [(0, 1), (2, 3), (1, 2), (3,), (0, 1, 2, 3)]
    groups = ranks.groups(sets)
    assert [g is not None for g in groups] == [rank in s for s in sets]
    seen = []
    for members, group in zip(sets, groups, strict=True):
        buffers = [np.full(n, rank, np.uint8) for n in (5, 0, 1 << 20)]
        if group is not None:
            ranks.broadcast_into(buffers, members[-1], group).wait()
        assert all((b == (members[-1] if group is not None else rank)).all() for b in buffers)
        seen.append(int(buffers[0][0]))
    return seen


def test_broadcasts_in_disjoint_and_overlapping_groups(world):
    assert world(broadcasts) == [[1, 0, 0, 0, 3], [1, 1, 2, 1, 3], [2, 3, 2, 2, 3], [3, 3, 3, 3, 3]]


def several_at_once(rank: int, world_size: int) -> list[int]:
    ranks = default().ranks
    buffers = [np.full(1000, rank, np.uint8) for _ in range(8)]
    pending = [ranks.broadcast_into([b], i % world_size) for i, b in enumerate(buffers)]
    threads = [threading.Thread(target=each.wait) for each in reversed(pending)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [int(b[-1]) for b in buffers]


def test_broadcasts_may_be_waited_for_in_any_order_and_thread(world):
    assert world(several_at_once) == [[0, 1, 2, 3, 0, 1, 2, 3]] * 4


def wrong_calls(rank: int, world_size: int) -> None:
    ranks = default().ranks
    for bad in [(1, 0), (0, 0, 1), (0, 1, 7), ()]:
        with pytest.raises(PlanError, match="sorted set"):
            ranks.groups([bad])
    with pytest.raises(PlanError, match="in the group of ranks"):
        ranks.broadcast_into([], 1 - rank, ranks.groups([(rank,)])[0])
    buffer = np.zeros(4 + rank, np.uint8)
    if rank == 0:
        ranks.broadcast_into([buffer], 0).wait()
    else:
        with pytest.raises(PlanError, match="4 bytes, 5 were expected"):
            ranks.broadcast_into([buffer], 0).wait()


def test_wrong_calls_are_refused(world):
    world(wrong_calls, world_size=2)


def use_key_value_store(rank: int, world_size: int) -> bytes | None:
    ranks = default().ranks
    box = ranks.key_value_store
    assert box.get("absent") is None
    if rank == 0:
        box.set("empty", b"")
        box.set("key", b"\x00\xff" * 1000)
    meet(ranks, "set")
    value, empty = box.get("key"), box.get("empty")
    assert empty == b""
    meet(ranks, "read")
    box.delete(f"absent {rank}")
    box.delete("key")
    meet(ranks, "deleted")
    assert box.get("key") is None
    return value


def test_key_value_store(world):
    assert world(use_key_value_store) == [b"\x00\xff" * 1000] * 4


def use_key_value_store_from_threads(rank: int, world_size: int) -> int:
    ranks = default().ranks
    wrong: list[object] = []

    def talk(number: int) -> None:
        for i in range(100):
            ranks.key_value_store.set(f"{rank}/{number}/{i}", str(i).encode())
            if ranks.key_value_store.get(f"{rank}/{number}/{i}") != str(i).encode():
                wrong.append((number, i))

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):  # collectives go on beside it
        ranks.all_gather_object(rank)
    for thread in threads:
        thread.join(20)
    return len(wrong)


def test_key_value_store_is_usable_from_threads(world):
    assert world(use_key_value_store_from_threads, world_size=2) == [0, 0]


def caught_after(call: Callable[[], object]) -> RankFailedError:
    """What a call raises once a rank is gone, which may take a moment."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            call()
        except RankFailedError as error:
            return error
    raise AssertionError("nobody noticed")


def rank_leaves(rank: int, world_size: int, leaver: int) -> tuple[int, ...]:
    ranks = default().ranks
    ranks.all_gather_object(None)
    if rank == leaver:
        ranks.close(patience=0)
        return ()
    ranks.timeout = 0.5
    with pytest.raises(RankTimeoutError) as caught:
        ranks.all_gather_object(None)
    return caught.value.ranks


def test_a_rank_that_is_gone_is_named(world):
    assert world(rank_leaves, 2, world_size=3) == [(2,), (2,), ()]


def rank_dies(rank: int, world_size: int) -> tuple[int, ...]:
    if rank == 1:
        default().ranks.all_gather_object(None)
        os._exit(9)
    return rank_leaves(rank, world_size, 1)


def test_a_rank_that_dies_is_named(world):
    with pytest.raises(PoolError) as caught:
        world(rank_dies, world_size=3)
    assert list(caught.value.problems) == [1]


def rank_zero_leaves(rank: int, world_size: int) -> None:
    store = default().ranks.key_value_store
    if rank == 0:
        assert store.get("came", 20.0) is not None
        os._exit(9)
    assert caught_after(lambda: store.set("came", b"")).ranks == (0,)


def test_rank_zero_dies(world):
    with pytest.raises(PoolError) as caught:
        world(rank_zero_leaves, world_size=2)
    assert list(caught.value.problems) == [0]


def rank_stays_away(rank: int, world_size: int) -> tuple[int, ...]:
    ranks = default().ranks
    meet(ranks, "here")
    if rank == 1:
        meet(ranks, "done")
        return ()
    ranks.timeout = 0.3
    with pytest.raises(RankTimeoutError) as caught:
        ranks.all_gather_object(None)
    meet(ranks, "done")
    return caught.value.ranks


def test_a_rank_that_does_not_come_is_named(world):
    assert world(rank_stays_away, world_size=2) == [(1,), ()]


def test_nobody_there():
    alone = SampleRanks(ProcessGroup(1, 2, "127.0.0.1", free_port()))
    alone.timeout = 0.2
    with pytest.raises(RankTimeoutError):
        _ = alone.key_value_store


def test_one_platform_per_group():
    framework.init_process_group(0, 2, free_port())
    try:
        first = default()
        assert default() is first
        assert plugin.load() is first
        first.ranks.timeout = 0.2
        framework.destroy_process_group()
        framework.init_process_group(0, 2, free_port())
        assert default() is not first
        del first
        gc.collect()
    finally:
        framework.destroy_process_group()
    assert default().ranks.world_size == 1
    assert plugin.active() == 0
