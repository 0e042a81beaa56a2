"""What `Ranks` and `KeyValueStore` promise, on N ranks. Every check runs on each of them at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer
from hyper_ckpt.testing.conformance.check import NotApplicable, Part, expect
from hyper_ckpt.testing.conformance.subject import Subject, same_bytes

world = Part("world")

_LARGE = 16 << 20


def pattern(rank: int, nbytes: int) -> bytes:
    """Bytes that tell which rank sent them."""
    return bytes([rank + 1]) * nbytes


def wait_for(s: Subject, key: str) -> bytes:
    """The value of a key-value store key, once it is there."""
    deadline = time.monotonic() + s.timeout
    while time.monotonic() < deadline:
        value = s.ranks.key_value_store.get(key)
        if value is not None:
            return value
        time.sleep(0.002)
    raise AssertionError(
        f"promised: a key that one rank has set is seen by all\nseen: rank {s.ranks.rank} does not get {key!r} within "
        f"{s.timeout:g} s\nchange: KeyValueStore.set must reach every rank"
    )


def need(s: Subject, size: int) -> None:
    if s.ranks.world_size < size:
        raise NotApplicable(f"needs a world of {size} ranks (--ranks, or world_size of the suite)")


@world
def ranks_are_numbered(s: Subject) -> None:
    """Each process has its own rank, 0 to world_size - 1, and all know the world's size."""
    size = s.ranks.world_size
    seen = s.ranks.all_gather_object([s.ranks.rank, s.ranks.world_size])
    expect(
        seen == [[rank, size] for rank in range(size)],
        "rank r is at position r, and all agree on world_size",
        f"(rank, world_size) = {seen}",
        "number ranks as PlatformProbe.join was told",
    )


@world
def all_gather_object_is_in_rank_order(s: Subject) -> None:
    """`all_gather_object` gives every rank's value to every rank, in rank order, of any plain type."""
    values: list[Callable[[int], Any]] = [
        lambda rank: rank,
        lambda rank: None if rank else "zero",
        lambda rank: {"rank": rank, "list": [1] * rank, "bytes": pattern(rank, 3)},
        lambda rank: [rank, "ünïcødé", -1.5, True],
    ]
    for of in values:
        got = s.ranks.all_gather_object(of(s.ranks.rank))
        wanted = [of(rank) for rank in range(s.ranks.world_size)]
        expect(got == wanted, f"{wanted} on every rank", f"{got} on rank {s.ranks.rank}", "gather in rank order")


@world
def all_gather_object_of_unequal_sizes(s: Subject) -> None:
    """One rank's value may be several MiB, another's empty."""
    for large in range(s.ranks.world_size):
        got = s.ranks.all_gather_object(pattern(large, 4 << 20) if s.ranks.rank == large else b"")
        for rank, data in enumerate(got):
            wanted = pattern(large, 4 << 20) if rank == large else b""
            same_bytes(data, wanted, f"rank {rank}'s value where rank {large}'s is large", "exchange sizes first")


@world
def gather_bytes_of_unequal_sizes(s: Subject) -> None:
    """`gather_bytes` gives rank 0 everybody's bytes, of any sizes, and None to the others."""
    rank, size = s.ranks.rank, s.ranks.world_size
    for sizes in ([r * 1000 for r in range(size)], [0] * size, [1 << 20 if r == size - 1 else 1 for r in range(size)]):
        got = s.ranks.gather_bytes(pattern(rank, sizes[rank]))
        if rank != 0:
            expect(got is None, "gather_bytes gives None on ranks other than 0", f"{type(got)}", "return None there")
            continue
        expect(got is not None and len(got) == size, f"{size} parts on rank 0", f"{got!r:.80}", "see gather_bytes")
        assert got is not None
        for r, data in enumerate(got):
            same_bytes(bytes(data), pattern(r, sizes[r]), f"part {r} of gather_bytes", "exchange sizes first")


@world
def scatter_bytes_of_unequal_sizes(s: Subject) -> None:
    """`scatter_bytes` gives rank r part r of rank 0's parts, of any sizes."""
    rank, size = s.ranks.rank, s.ranks.world_size
    for sizes in ([r * 1000 for r in range(size)], [0] * size, [1 << 20 if r == size - 1 else 1 for r in range(size)]):
        parts = [pattern(r, n) for r, n in enumerate(sizes)] if rank == 0 else None
        got = s.ranks.scatter_bytes(parts)
        same_bytes(bytes(got), pattern(rank, sizes[rank]), f"part {rank} of scatter_bytes", "exchange sizes first")


def _buffers(rank: int, sizes: tuple[int, ...]) -> list[ByteBuffer]:
    return [np.full(n, rank + 1, np.uint8) for n in sizes]


def _check_broadcast(s: Subject, sizes: tuple[int, ...], src: int, group: Any, what: str) -> None:
    buffers = _buffers(s.ranks.rank, sizes)
    s.ranks.broadcast_into(buffers, src, group).wait()
    for buffer, n in zip(buffers, sizes, strict=True):
        same_bytes(
            buffer.tobytes(), pattern(src, n), f"{what}: rank {s.ranks.rank} has rank {src}'s bytes after wait", _SRC
        )


_SRC = "`src` counts in the world's ranks, also inside a group; fill every buffer before wait returns"


@world
def broadcast_from_every_rank(s: Subject) -> None:
    """`broadcast_into` fills all ranks' buffers with those of any rank: several at once, empty ones among them."""
    for src in range(s.ranks.world_size):
        _check_broadcast(s, (5, 0, 1000, 1), src, None, "a broadcast in the world")
        _check_broadcast(s, (), src, None, "a broadcast of nothing")


@world
def broadcast_of_large_buffers(s: Subject) -> None:
    """A buffer of 16 MiB arrives whole."""
    _check_broadcast(s, (_LARGE, 3), s.ranks.world_size - 1, None, "a large broadcast")


@world
def broadcasts_in_flight(s: Subject) -> None:
    """Several broadcasts may be started before any is waited for; each is complete when its wait returns."""
    sources = [i % s.ranks.world_size for i in range(6)]
    buffers = [_buffers(s.ranks.rank, (10_000,)) for _ in sources]
    pending = [s.ranks.broadcast_into(b, src) for b, src in zip(buffers, sources, strict=True)]
    for each, (buffer,), src in zip(pending, buffers, sources, strict=True):
        each.wait()
        same_bytes(buffer.tobytes(), pattern(src, 10_000), "a buffer is filled when its wait returns", _SRC)


@world
def broadcasts_in_disjoint_groups(s: Subject) -> None:
    """Groups without common ranks broadcast at the same time, each its own bytes."""
    need(s, 4)
    everybody = range(s.ranks.world_size)
    sets = [tuple(everybody[0::2]), tuple(everybody[1::2])]
    for members, group in zip(sets, s.ranks.groups(sets), strict=True):
        if s.ranks.rank in members:
            for src in members:
                _check_broadcast(s, (3, 1 << 20), src, group, f"a broadcast in the group {members}")


@world
def broadcasts_in_overlapping_groups(s: Subject) -> None:
    """A rank may be in several groups, and broadcasts in one after another; other ranks' buffers stay."""
    need(s, 3)
    last = s.ranks.world_size - 1
    sets = [(0, 1), (1, 2), (0, last), tuple(range(1, last + 1)), tuple(range(last + 1))]
    for members, group in zip(sets, s.ranks.groups(sets), strict=True):
        if s.ranks.rank in members:
            for src in members:
                _check_broadcast(s, (1000, 0), src, group, f"a broadcast in the group {members}")


@world
def groups_of_others_are_none(s: Subject) -> None:
    """`groups` gives None for sets that this rank is not in, and a handle for the others."""
    need(s, 2)
    sets = [(0,), tuple(range(1, s.ranks.world_size)), tuple(range(s.ranks.world_size))]
    got = [handle is not None for handle in s.ranks.groups(sets)]
    wanted = [s.ranks.rank in members for members in sets]
    expect(got == wanted, f"a handle for {sets}: {wanted}", f"{got} on rank {s.ranks.rank}", "see Ranks.groups")


@world
def groups_are_kept(s: Subject) -> None:
    """Asking for a set of ranks again gives the same handle: no new connections with every save."""
    sets = [tuple(range(s.ranks.world_size)), (0,)]
    first, again, turned = s.ranks.groups(sets), s.ranks.groups(sets), s.ranks.groups(sets[::-1])[::-1]
    same = all(a is b or a == b for other in (again, turned) for a, b in zip(first, other, strict=True))
    expect(same, "the same handle for the same ranks", f"{first}, then {again}", "keep handles by their tuple of ranks")


@world
def a_group_of_one(s: Subject) -> None:
    """A group may have one member; a broadcast in it leaves the buffers as they are."""
    sets = [(rank,) for rank in range(s.ranks.world_size)]
    group = s.ranks.groups(sets)[s.ranks.rank]
    expect(group is not None, "a rank has a handle for the group of itself", "None", "see Ranks.groups")
    _check_broadcast(s, (7, 0), s.ranks.rank, group, "a broadcast in a group of one")


@world
def the_key_value_store_carries_bytes(s: Subject) -> None:
    """A value that one rank sets is got by all, byte for byte: binary, empty, 1 MiB, and replaced ones."""
    box, rank, size = s.ranks.key_value_store, s.ranks.rank, s.ranks.world_size
    values = {"binary": bytes(range(256)), "empty": b"", "large": pattern(7, 1 << 20), "text": b"\0null\xff"}
    box.set(f"carries/{rank}/twice", b"old")
    for name, value in values.items():
        box.set(f"carries/{rank}/{name}", value + pattern(rank, len(value) > 0))
    box.set(f"carries/{rank}/twice", b"new")
    for other in range(size):
        for name, value in values.items():
            got = wait_for(s, f"carries/{other}/{name}")
            wanted = value + pattern(other, len(value) > 0)
            same_bytes(got, wanted, f"rank {other}'s {name} value is carried", "carry bytes unchanged")
    s.ranks.all_gather_object(None)
    for other in range(size):
        same_bytes(
            wait_for(s, f"carries/{other}/twice"), b"new", "set replaces an earlier value", "see KeyValueStore.set"
        )


@world
def an_absent_key_is_none(s: Subject) -> None:
    """`get` of a key that nobody has set gives None at once, each time; it neither waits nor makes the key."""
    for _ in range(3):
        got = s.ranks.key_value_store.get("absent/never set")
        expect(got is None, "get of an absent key is None", f"{got!r}", "return None where the key is not there")


@world
def deleted_keys_are_absent(s: Subject) -> None:
    """`delete` makes a key absent for all ranks; deleting an absent one is fine."""
    box, key = s.ranks.key_value_store, f"deleted/{s.ranks.rank}"
    box.delete(key)
    box.set(key, b"x")
    expect(
        box.get(key) == b"x", "a rank gets what it has set", f"{box.get(key)!r}", "set takes effect before it returns"
    )
    s.ranks.all_gather_object(None)
    other = f"deleted/{(s.ranks.rank + 1) % s.ranks.world_size}"
    box.delete(other)
    box.delete(other)
    s.ranks.all_gather_object(None)
    expect(box.get(key) is None, "a deleted key is absent for all", f"{box.get(key)!r}", "delete it for every rank")


@world
def a_get_waits_until_the_key_is_set(s: Subject) -> None:
    """`get_many` with a timeout gives what is there as soon as one of its keys is, and {} when the time is up; other
    calls go on meanwhile."""
    store, rank, size = s.ranks.key_value_store, s.ranks.rank, s.ranks.world_size
    got = store.get_many([f"waits/{rank}/never"], 0.05)
    expect(got == {}, "{} when no key was set in time", f"{got!r:.80}", "return {} after `timeout` seconds")
    before, key = f"waits/{(rank - 1) % size}", f"waits/{rank}"
    seen: dict[str, bytes] = {}
    waiting = threading.Thread(target=lambda: seen.update(store.get_many([f"{before}/never", before], s.timeout)))
    waiting.start()
    s.ranks.all_gather_object(None)  # nobody sets a key before all others are about to wait for it
    store.set(key, pattern(rank, 3))
    waiting.join(2 * s.timeout)
    wanted = {before: pattern((rank - 1) % size, 3)}
    expect(seen == wanted, f"a get that waits is answered with {wanted}", f"{seen!r:.80}", "answer waiting gets in set")


@world
def keys_are_deleted_by_prefix(s: Subject) -> None:
    """`delete_prefix` makes all keys absent that begin so, on all ranks, and no other ones."""
    store, own, other = s.ranks.key_value_store, f"prefix/{s.ranks.rank}/", f"prefix-/{s.ranks.rank}"
    store.set_many({f"{own}{n}": b"x" for n in range(300)} | {other: b"stays"})
    store.delete_prefix(own)
    left = store.get_many([f"{own}{n}" for n in range(300)])
    expect(left == {}, f"no key that begins with {own!r}", f"{len(left)} of 300", "see KeyValueStore.delete_prefix")
    s.ranks.all_gather_object(None)
    keys = [f"prefix-/{rank}" for rank in range(s.ranks.world_size)]
    found = store.get_many(keys)
    expect(
        len(found) == len(keys), "keys that begin otherwise stay", f"{len(found)} of {len(keys)}", "see delete_prefix"
    )


@world
def the_key_value_store_serves_several_threads(s: Subject) -> None:
    """`set`, `get` and `delete` work from several threads of a rank at once, beside gets of absent keys."""
    box, rank = s.ranks.key_value_store, s.ranks.rank
    problems: list[str] = []

    def work(number: int) -> None:
        try:
            for turn in range(15):
                key, value = f"threads/{rank}/{number}/{turn}", pattern(number, turn * 100)
                box.set(key, value)
                absent, got = box.get(f"threads/absent/{turn}"), box.get(key)
                box.delete(key)
                if absent is not None or got != value or box.get(key) is not None:
                    problems.append(f"thread {number} got {got!r:.60} and {absent!r:.60}")
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(s.timeout)
    if any(thread.is_alive() for thread in threads):
        problems.append(f"a thread did not return within {s.timeout:g} s")
    expect(not problems, "the store serves several threads at once", "; ".join(problems[:3]), "guard its client")


@world
def the_key_value_store_needs_no_other_rank(s: Subject) -> None:
    """Calls on the key-value store return while all other ranks sit in a collective."""
    busy = s.ranks.world_size - 1
    if s.ranks.rank == busy:
        for turn in range(50):
            s.ranks.key_value_store.set(f"alone/{turn}", pattern(turn, 10))
            got = s.ranks.key_value_store.get(f"alone/{turn}")
            expect(got == pattern(turn, 10), "a rank gets what it has set", f"{got!r}", "see KeyValueStore")
            s.ranks.key_value_store.delete(f"alone/{turn}")
    got_all = s.ranks.all_gather_object(s.ranks.rank)
    expect(got_all == list(range(s.ranks.world_size)), "the collective completes", f"{got_all}", "see Ranks")


@world
def the_key_value_store_serves_a_rank_in_a_collective(s: Subject) -> None:
    """Other threads of a rank use the key-value store while its main thread waits in a collective."""
    need(s, 2)
    late, rank = s.ranks.world_size - 1, s.ranks.rank
    problems: list[str] = []

    def work() -> None:
        try:
            for turn in range(20):  # until the main thread is surely in its collective
                s.ranks.key_value_store.set(f"beside/{rank}/{turn}", b"x")
                s.ranks.key_value_store.get(f"beside/{rank}/{turn}")
                s.ranks.key_value_store.delete(f"beside/{rank}/{turn}")
                time.sleep(0.02)
            s.ranks.key_value_store.set(f"beside/{rank}", b"done")
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, daemon=True)
    if rank != late:
        thread.start()
    else:
        _wait_beside(s, late)
    s.ranks.all_gather_object(None)
    if rank != late:
        thread.join(s.timeout)
    expect(
        not problems,
        "the key-value store serves other threads of a rank in a collective",
        f"{problems[:1]}",
        "see KeyValueStore",
    )


def _wait_beside(s: Subject, late: int) -> None:
    deadline = time.monotonic() + s.timeout
    missing = set(range(late))
    while missing:
        missing = {rank for rank in missing if s.ranks.key_value_store.get(f"beside/{rank}") is None}
        expect(
            time.monotonic() < deadline,
            "threads of a rank whose main thread waits in a collective use the key-value store",
            f"those of ranks {sorted(missing)} do not get on while this rank has not come to the collective",
            "no lock, connection or interpreter lock may be held by both: give the store a connection of its own",
        )
        time.sleep(0.005)
