"""MindSporeRanks on mccl: what the contract says, for the world group and for others."""

import threading
import time

import numpy as np
import pytest

from hyper_ckpt.contracts.platform import Done
from hyper_ckpt.errors import PlanError, PlatformError, RankFailedError, RankTimeoutError
from hyper_ckpt.testing.pool import PoolError


def ranks_of(world_size, **more):
    """Of a fresh platform on the first `world_size` ranks."""
    import mccl_world

    from hyper_ckpt_mindspore.platform import MindSporePlatform

    return MindSporePlatform(mccl_world.group(world_size), **more).ranks


def objects(rank: int, world_size: int) -> bool:
    ranks = ranks_of(world_size)
    assert (ranks.rank, ranks.world_size) == (rank, world_size)
    assert ranks.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(world_size)]
    for size in (900, 1016, 1017, 2000):  # around what goes with the first message
        values = [b"x" * (size - 30 + r) for r in range(world_size)]
        assert ranks.all_gather_object(values[rank]) == values
    big = ranks.all_gather_object(bytes([rank]) * (1 << 20) if rank == 1 else rank)
    return big == [b"\x01" * (1 << 20) if r == 1 else r for r in range(world_size)]


@pytest.mark.parametrize("world_size", [4, 3, 2])
def test_objects_small_and_large(mccl, world_size):
    assert mccl(objects, world_size=world_size) == [True] * world_size


def gather_and_scatter(rank: int, world_size: int, sizes: list[int]) -> tuple[object, bytes]:
    ranks = ranks_of(world_size)
    gathered = ranks.gather_bytes(bytes([rank]) * sizes[rank])
    parts = [bytes([r]) * sizes[r] for r in range(world_size)] if rank == 0 else None
    return gathered, ranks.scatter_bytes(parts)


@pytest.mark.parametrize("sizes", [[3, 0, (5 << 19) + 1, 1 << 20], [0, 0, 0, 0], [0, 1017, 1016], [1016, 1015]])
def test_gather_and_scatter_of_unequal_parts(mccl, sizes):
    parts = [bytes([r]) * size for r, size in enumerate(sizes)]
    results = mccl(gather_and_scatter, sizes, world_size=len(sizes))
    assert [r[0] for r in results] == [parts, *[None] * (len(sizes) - 1)]
    assert [r[1] for r in results] == parts


def scatter_of_too_few(rank: int, world_size: int) -> None:
    if rank == 0:
        with pytest.raises(PlanError):
            ranks_of(world_size).scatter_bytes([b""])


def test_scatter_wants_a_part_for_everybody(mccl):
    mccl(scatter_of_too_few, world_size=2)


def broadcasts(rank: int, world_size: int) -> list[int]:
    ranks = ranks_of(world_size)
    sets = [(0, 1), (2, 3), (1, 2), (3,), (0, 1, 2, 3)]
    groups = ranks.groups(sets)
    assert [g is not None for g in groups] == [rank in s for s in sets]
    assert ranks.groups(sets) == groups
    again = ranks_of(world_size).groups(sets)
    assert [g and g.group and g.group.name for g in again] == [g and g.group and g.group.name for g in groups]
    seen = []
    for members, group in zip(sets, groups, strict=True):
        buffers = [np.full(n, rank, np.uint8) for n in (5, 0, (1 << 20) + 3)]
        if group is not None:
            ranks.broadcast_into(buffers, members[-1], group).wait()
        assert all((b == (members[-1] if group is not None else rank)).all() for b in buffers)
        seen.append(int(buffers[0][0]))
    return seen


def test_broadcasts_in_disjoint_and_overlapping_groups(mccl):
    assert mccl(broadcasts) == [[1, 0, 0, 0, 3], [1, 1, 2, 1, 3], [2, 3, 2, 2, 3], [3, 3, 3, 3, 3]]


def broadcast_several_at_once(rank: int, world_size: int) -> list[int]:
    ranks = ranks_of(world_size)
    buffers = [np.full(1000, rank, np.uint8) for _ in range(8)]
    # A source may be read-only.
    mine = [
        np.frombuffer(bytes([rank]) * 1000, np.uint8) if rank == i % world_size else b for i, b in enumerate(buffers)
    ]
    pending = [ranks.broadcast_into([b], i % world_size) for i, b in enumerate(mine)]
    for each in reversed(pending):
        each.wait()
    return [int(b[-1]) for b in mine]


def test_broadcasts_may_be_waited_for_in_any_order(mccl):
    assert mccl(broadcast_several_at_once) == [[0, 1, 2, 3, 0, 1, 2, 3]] * 4


def wrong_groups(rank: int, world_size: int) -> None:
    ranks = ranks_of(world_size)
    for bad in [(1, 0), (0, 0, 1), (0, 1, 7)]:
        with pytest.raises(PlanError, match="sorted set"):
            ranks.groups([bad])
    with pytest.raises(PlanError, match="in the group of ranks"):
        ranks.broadcast_into([], 1 - rank, ranks.groups([(rank,)])[0])
    from hyper_ckpt_mindspore.platform import MindSporePlatform

    with pytest.raises(PlatformError, match="'nobody'"):
        MindSporePlatform("nobody")


def test_wrong_groups_are_refused(mccl):
    mccl(wrong_groups, world_size=2)


def subset(rank: int, world_size: int) -> object:
    """A group whose first rank is not MindSpore's rank 0."""
    import mindspore.communication as communication

    from hyper_ckpt_mindspore.platform import MindSporePlatform

    mine = [1, 3] if rank % 2 else [0, 2]
    communication.create_group(f"half-{mine[0]}", mine)
    ranks = MindSporePlatform(f"half-{mine[0]}").ranks
    if ranks.rank == 0:
        ranks.key_value_store.set("from", str(rank).encode())
    gathered = ranks.all_gather_object(rank)
    posted = ranks.key_value_store.get("from")
    buffer = np.full(4, rank, np.uint8)
    ranks.broadcast_into([buffer], 1, ranks.groups([(0, 1)])[0]).wait()
    scattered = ranks.scatter_bytes([b"first", b"second"] if ranks.rank == 0 else None)
    ranks.all_gather_object(None)  # rank 0 hosts the store: it leaves last
    return (
        ranks.rank,
        ranks.global_ranks,
        gathered,
        posted,
        ranks.gather_bytes(bytes([rank])),
        int(buffer[0]),
        scattered,
    )


def test_a_subset_numbers_its_own_ranks(mccl):
    assert mccl(subset) == [
        (0, (0, 2), [0, 2], b"0", [b"\x00", b"\x02"], 2, b"first"),
        (0, (1, 3), [1, 3], b"1", [b"\x01", b"\x03"], 3, b"first"),
        (1, (0, 2), [0, 2], b"0", None, 2, b"second"),
        (1, (1, 3), [1, 3], b"1", None, 3, b"second"),
    ]


def use_key_value_store(rank: int, world_size: int, by_store: bool) -> bytes | None:
    import mccl_world

    ranks = ranks_of(world_size, store=mccl_world.store() if by_store else None)
    box = ranks.key_value_store
    if rank == 0:
        box.set("empty", b"")
        box.set("key", b"nothing yet")
        box.set("key", b"\x00\xff" * 1000)
    deadline = time.monotonic() + 20
    while box.get("key") != b"\x00\xff" * 1000 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert box.get("empty") == b""
    assert box.get("absent") is None
    assert box.get("absent") is None, "asking does not make the key"
    value = box.get("key")
    ranks.all_gather_object(None)
    box.delete(f"absent {rank}")
    box.delete("key")
    ranks.all_gather_object(None)
    assert box.get("key") is None
    ranks.all_gather_object(None)
    if rank == 0:
        box.set("key", b"again")
    ranks.all_gather_object(None)
    assert box.get("key") == b"again"
    if by_store:
        key = f"there/hyper_ckpt/key_value_store/{ranks._group.name}"
        assert mccl_world.store().add(key, 0) == 0, "the address is gone once all have connected"
    ranks.all_gather_object(None)
    return value


@pytest.mark.parametrize("by_store", [False, True])
@pytest.mark.parametrize("world_size", [4, 3])
def test_key_value_store(mccl, world_size, by_store):
    assert mccl(use_key_value_store, by_store, world_size=world_size) == [b"\x00\xff" * 1000] * world_size


def use_key_value_store_from_threads(rank: int, world_size: int) -> int:
    ranks = ranks_of(world_size)
    box = ranks.key_value_store
    errors: list[BaseException] = []

    def talk(number: int) -> None:
        try:
            for i in range(100):
                box.set(f"{rank}/{number}/{i}", str(i).encode())
                assert box.get(f"{rank}/{number}/{i}") == str(i).encode()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for i in range(20):
        assert ranks.all_gather_object(i) == [i] * world_size  # collectives go on beside it
    for thread in threads:
        thread.join()
    ranks.all_gather_object(None)
    return len(errors)


def test_key_value_store_is_usable_from_threads(mccl):
    assert mccl(use_key_value_store_from_threads, world_size=2) == [0, 0]


def default_platform(rank: int, world_size: int) -> int:
    from hyper_ckpt_mindspore import plugin

    first = plugin.load()
    assert plugin.load() is first
    assert first.ranks.all_gather_object(rank) == list(range(world_size))
    return plugin.active()


def test_default_is_the_world(mccl):
    assert mccl(default_platform) == [4] * 4


class LostStore:
    """A client whose server is gone: MindSpore says so only where a counter is asked for."""

    def set(self, key: str, value: bytes) -> None:
        pass

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("TCP addition operation failed!")


def test_a_lost_store_of_mindspores_is_a_failed_rank():
    from hyper_ckpt_mindspore.rendezvous import Notes

    notes = Notes(LostStore())
    for use in (lambda: notes.look("k"), lambda: notes.put("k", b"v")):
        with pytest.raises(RankFailedError, match="host") as caught:
            use()
        assert caught.value.ranks == (0,)


class RacingStore:
    """A store from which a text vanishes between a look at its counter and the reading of it."""

    there = 1

    def add(self, key: str, amount: int) -> int:
        return self.there

    def get(self, key: str) -> bytes:
        self.there = 0
        raise RuntimeError("TCP get operation failed.")


def test_a_text_deleted_while_it_is_read_is_absent():
    from hyper_ckpt_mindspore.rendezvous import Notes

    assert Notes(RacingStore()).look("k") is None


def stale_address(rank: int, world_size: int) -> bytes | None:
    """An address that nobody answers at, left by a platform that is gone, does no harm."""
    import mccl_world

    from hyper_ckpt.key_value import Address
    from hyper_ckpt_mindspore.rendezvous import Notes

    store = mccl_world.store()
    ranks = ranks_of(world_size, store=store)
    if rank == 0:
        Notes(store).put(f"hyper_ckpt/key_value_store/{ranks._group.name}", Address("127.0.0.1", 9).encoded())
    mccl_world.barrier(world_size)
    if rank == 0:
        time.sleep(0.2)
    box = ranks.key_value_store
    box.set(f"from/{rank}", b"here")
    mccl_world.barrier(world_size)
    value = box.get(f"from/{1 - rank}")
    mccl_world.barrier(world_size)
    return value


def test_a_stale_address_is_tried_again(mccl):
    assert mccl(stale_address, world_size=2) == [b"here"] * 2


def silent_rank_zero(rank: int, world_size: int) -> str:
    import mccl_world

    ranks = ranks_of(world_size, store=mccl_world.store())
    if rank == 0:
        mccl_world.barrier(world_size)
        return ""
    ranks.timeout = 0.3
    with pytest.raises(RankTimeoutError, match="has not called in within") as caught:
        ranks.key_value_store  # noqa: B018 - connects
    mccl_world.barrier(world_size)
    return str(caught.value)


def test_with_a_store_a_silent_rank_zero_is_named_in_time(mccl):
    assert mccl(silent_rank_zero, world_size=2)[1]


def named_host(rank: int, world_size: int, by_store: bool) -> bytes | None:
    import mccl_world

    store = mccl_world.store() if by_store else None
    box = ranks_of(world_size, store=store, key_value_host="localhost").key_value_store
    if rank == 0:
        box.set("key", b"value")
    mccl_world.barrier(world_size)
    value = box.get("key")
    mccl_world.barrier(world_size)
    return value


@pytest.mark.parametrize("by_store", [False, True])
def test_the_caller_may_name_rank_zeros_host(mccl, by_store):
    assert mccl(named_host, by_store, world_size=2) == [b"value"] * 2


def rank_zero_dies(rank: int, world_size: int) -> None:
    ranks = ranks_of(world_size)
    ranks.key_value_store.set(f"here/{rank}", b"")
    if rank == 0:
        import os

        while ranks.key_value_store.get("here/1") is None:
            time.sleep(0.01)
        os._exit(7)
    ranks.key_value_store.get("absent", 20.0)


def test_a_rank_that_dies_is_noticed_at_once(doomed):
    """By the key-value store and the pool, not by MindSpore, which would wait for it."""
    with pytest.raises(PoolError, match="rank 0 died") as caught:
        doomed.run(rank_zero_dies, timeout=30.0)
    error = caught.value.failures[1].exception()
    assert isinstance(error, RankFailedError)
    assert error.ranks == (0,)


def test_without_a_world_it_is_a_world_of_one():
    from hyper_ckpt_mindspore.platform import MindSporePlatform, default

    ranks = MindSporePlatform().ranks
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.all_gather_object(1) == [1]
    assert ranks.gather_bytes(b"x") == [b"x"]
    assert ranks.scatter_bytes([b"y"]) == b"y"
    assert isinstance(ranks.broadcast_into([np.zeros(1, np.uint8)], 0), Done)
    ranks.key_value_store.set("a", b"b")
    assert ranks.key_value_store.get("a") == b"b"
    assert default() is default()
