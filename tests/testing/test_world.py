"""The thread world: collectives do what they say, and what real ranks would hang on is an error."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.testing.thread_ranks import ThreadRanks, WorldBrokenError
from hyper_ckpt.testing.time_scale import scaled
from hyper_ckpt.testing.world import run_world


def ranks_of(platform: Platform) -> ThreadRanks:
    assert isinstance(platform.ranks, ThreadRanks)
    return platform.ranks


def test_ranks_are_numbered_and_results_in_order() -> None:
    assert run_world(3, lambda p: (p.ranks.rank, p.ranks.world_size, p.name)) == [(r, 3, "numpy") for r in range(3)]


def test_objects_are_copied() -> None:
    def gather(platform: Platform) -> list[list[int]]:
        gathered = platform.ranks.all_gather_object([platform.ranks.rank])
        gathered[0].append(99)
        return platform.ranks.all_gather_object(gathered[-1])

    assert run_world(3, gather) == [[[2], [2], [2]]] * 3


def test_bytes_are_gathered_and_scattered() -> None:
    def exchange(platform: Platform) -> tuple[list[bytes] | None, bytes]:
        ranks = platform.ranks
        gathered = ranks.gather_bytes(b"x" * ranks.rank)
        return gathered, ranks.scatter_bytes([b"a", b"", b"ccc"] if ranks.rank == 0 else None)

    results = run_world(3, exchange)
    assert [r[0] for r in results] == [[b"", b"x", b"xx"], None, None]
    assert [r[1] for r in results] == [b"a", b"", b"ccc"]


def test_broadcasts_in_overlapping_groups() -> None:
    def broadcast(platform: Platform) -> tuple[int, int]:
        ranks = platform.ranks
        left, right, middle = ranks.groups([(0, 1), (2, 3), (1, 2)])
        buffer = np.full(4, ranks.rank, np.uint8)
        ranks.broadcast_into([buffer], 1 if left else 2, left or right).wait()
        first = int(buffer[0])
        if middle:
            ranks.broadcast_into([buffer], 2, middle).wait()
        return first, int(buffer[0])

    assert run_world(4, broadcast) == [(1, 1), (1, 2), (2, 2), (2, 2)]


def test_traffic_is_counted() -> None:
    def talk(platform: Platform) -> tuple[int, int, int]:
        ranks = ranks_of(platform)
        ranks.broadcast_into([np.zeros(100, np.uint8), np.zeros(0, np.uint8)], 0).wait()
        ranks.gather_bytes(b"12345")
        if ranks.rank == 0:
            ranks.key_value_store.set("key", b"1234567")
        return ranks.traffic.messages, ranks.traffic.bytes_sent, ranks.traffic.bytes_received

    assert run_world(3, talk) == [(3, 107, 10), (2, 5, 100), (2, 5, 100)]


def test_the_key_value_store_is_shared_and_never_waits() -> None:
    def post(platform: Platform) -> bytes | None:
        store = platform.ranks.key_value_store
        assert store.get(f"none/{platform.ranks.rank}") is None
        if platform.ranks.rank == 0:
            store.set("key", b"\x00\xff")
        platform.ranks.all_gather_object(None)
        value = store.get("key")
        platform.ranks.all_gather_object(None)
        store.delete("key")
        assert store.get("key") is None
        return value

    assert run_world(3, post) == [b"\x00\xff"] * 3


def fail_on_one(platform: Platform) -> None:
    if platform.ranks.rank == 1:
        raise KeyError("the first cause")
    platform.ranks.all_gather_object(None)


def test_a_failing_rank_releases_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(KeyError, match="the first cause") as caught:
        run_world(3, fail_on_one)
    assert time.monotonic() - begin < 5
    assert any("rank 1 of 3" in note for note in getattr(caught.value, "__notes__", ["rank 1 of 3"]))


def test_exceptions_can_be_returned() -> None:
    results = run_world(3, fail_on_one, return_exceptions=True)
    assert isinstance(results[1], KeyError)
    assert isinstance(results[0], WorldBrokenError)
    assert "rank 1 raised KeyError" in str(results[2])


def wrong_call(platform: Platform) -> None:
    if platform.ranks.rank == 0:
        platform.ranks.all_gather_object(None)
    else:
        platform.ranks.gather_bytes(b"")


def wrong_size(platform: Platform) -> None:
    platform.ranks.broadcast_into([np.zeros(1 + platform.ranks.rank, np.uint8)], 0)


def wrong_source(platform: Platform) -> None:
    platform.ranks.broadcast_into([np.zeros(1, np.uint8)], platform.ranks.rank)


def wrong_groups(platform: Platform) -> None:
    platform.ranks.groups([(0, 1)] if platform.ranks.rank else [(0,)])


@pytest.mark.parametrize("fn", [wrong_call, wrong_size, wrong_source, wrong_groups])
def test_calls_out_of_step_are_errors(fn: Any) -> None:
    with pytest.raises(WorldBrokenError, match="out of step"):
        run_world(2, fn)


def test_a_rank_that_returned_is_not_waited_for() -> None:
    with pytest.raises(WorldBrokenError, match=r"ranks \[1\] have returned"):
        run_world(2, lambda p: p.ranks.all_gather_object(0) if p.ranks.rank == 0 else None)


def test_ranks_that_wait_for_each_other_are_noticed() -> None:
    def crossed(platform: Platform) -> None:
        pair, everybody = platform.ranks.groups([(0, 1), (0, 1, 2)])
        group = pair if platform.ranks.rank == 1 else everybody
        platform.ranks.broadcast_into([np.zeros(1, np.uint8)], 0, group)

    begin = time.monotonic()
    with pytest.raises(WorldBrokenError, match="waits for another"):
        run_world(3, crossed)
    assert time.monotonic() - begin < 5


def test_collectives_belong_to_the_thread_of_the_rank() -> None:
    def from_a_thread(platform: Platform) -> None:
        errors: list[BaseException] = []

        def call() -> None:
            try:
                platform.ranks.all_gather_object(None)
            except WorldBrokenError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        raise errors[0]

    with pytest.raises(WorldBrokenError, match="outside the thread"):
        run_world(1, from_a_thread)


def test_ranks_that_do_not_finish_are_named() -> None:
    release = threading.Event()

    def hang(platform: Platform) -> None:
        if platform.ranks.rank == 1:
            release.wait()

    with pytest.raises(TimeoutError, match=r"ranks \[1\](.|\n)*release.wait") as caught:
        run_world(2, hang, timeout=0.2)
    release.set()
    assert f"{scaled(0.2)} s" in str(caught.value)


@pytest.mark.parametrize("group", [(1, 0), (0, 0), (0, 5), ()])
def test_unsorted_or_unknown_groups_are_refused(group: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sorted set"):
        run_world(2, lambda p: p.ranks.groups([group]))
