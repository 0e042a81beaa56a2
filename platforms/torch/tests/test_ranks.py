"""TorchRanks on gloo: what the contract says, for the default group and for a subset."""

import gc
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hyper_ckpt
from hyper_ckpt.contracts.platform import Done
from hyper_ckpt.errors import PlanError, PlatformError, RankFailedError
from hyper_ckpt.key_value import Address, KeyValueServer
from hyper_ckpt.testing.pool import PoolError
from hyper_ckpt_torch import plugin, rendezvous
from hyper_ckpt_torch.gloo import GlooGroup
from hyper_ckpt_torch.platform import TorchPlatform, default
from hyper_ckpt_torch.ranks import TorchRanks


def objects(rank: int, world_size: int) -> bool:
    ranks = TorchPlatform().ranks
    assert (ranks.rank, ranks.world_size) == (rank, world_size)
    assert ranks.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(world_size)]
    big = ranks.all_gather_object(bytes([rank]) * (1 << 20) if rank == 1 else rank)
    return big == [0, b"\x01" * (1 << 20), 2, 3]


def test_objects_small_and_large(gloo):
    assert gloo(objects) == [True] * 4


def gather_and_scatter(rank: int, world_size: int, sizes: list[int]) -> tuple[object, bytes]:
    ranks = TorchPlatform().ranks
    gathered = ranks.gather_bytes(bytes([rank]) * sizes[rank])
    parts = [bytes([r]) * sizes[r] for r in range(world_size)] if rank == 0 else None
    return gathered, ranks.scatter_bytes(parts)


@pytest.mark.parametrize("sizes", [[3, 0, 1 << 20, 1], [0, 0, 0, 0], [0, 5, 0, 7]])
def test_gather_and_scatter_of_unequal_parts(gloo, sizes):
    parts = [bytes([r]) * sizes[r] for r in range(4)]
    results = gloo(gather_and_scatter, sizes)
    assert [r[0] for r in results] == [parts, None, None, None]
    assert [r[1] for r in results] == parts


def scatter_of_too_few(rank: int, world_size: int) -> None:
    if rank == 0:
        with pytest.raises(PlanError):
            TorchPlatform().ranks.scatter_bytes([b""])


def test_scatter_wants_a_part_for_everybody(gloo):
    gloo(scatter_of_too_few, world_size=2)


def broadcasts(rank: int, world_size: int) -> list[int]:
    ranks = TorchPlatform().ranks
    sets = [(0, 1), (2, 3), (1, 2), (3,), (0, 1, 2, 3)]
    groups = ranks.groups(sets)
    assert [g is not None for g in groups] == [rank in s for s in sets]
    assert ranks.groups(sets) == groups
    seen = []
    for members, group in zip(sets, groups, strict=True):
        buffers = [np.full(n, rank, np.uint8) for n in (5, 0, 1 << 20)]
        if group is not None:
            ranks.broadcast_into(buffers, members[-1], group).wait()
        assert all((b == (members[-1] if group is not None else rank)).all() for b in buffers)
        seen.append(int(buffers[0][0]))
    return seen


def test_broadcasts_in_disjoint_and_overlapping_groups(gloo):
    assert gloo(broadcasts) == [[1, 0, 0, 0, 3], [1, 1, 2, 1, 3], [2, 3, 2, 2, 3], [3, 3, 3, 3, 3]]


def broadcast_several_at_once(rank: int, world_size: int) -> list[int]:
    ranks = TorchPlatform().ranks
    buffers = [np.full(1000, rank, np.uint8) for _ in range(8)]
    # A source may be read-only.
    mine = [
        np.frombuffer(bytes([rank]) * 1000, np.uint8) if rank == i % world_size else b for i, b in enumerate(buffers)
    ]
    pending = [ranks.broadcast_into([b], i % world_size) for i, b in enumerate(mine)]
    for each in reversed(pending):
        each.wait()
    return [int(b[-1]) for b in mine]


def test_broadcasts_may_be_waited_for_in_any_order(gloo):
    assert gloo(broadcast_several_at_once) == [[0, 1, 2, 3, 0, 1, 2, 3]] * 4


def wrong_groups(rank: int, world_size: int) -> None:
    ranks = TorchPlatform().ranks
    for bad in [(1, 0), (0, 0, 1), (0, 1, 7)]:
        with pytest.raises(PlanError, match="sorted set"):
            ranks.groups([bad])
    with pytest.raises(PlanError, match="in the group of ranks"):
        ranks.broadcast_into([], 1 - rank, ranks.groups([(rank,)])[0])


def test_wrong_groups_are_refused(gloo):
    gloo(wrong_groups, world_size=2)


def use_key_value_store(rank: int, world_size: int) -> bytes | None:
    box = TorchPlatform().ranks.key_value_store
    if rank == 0:
        box.set("empty", b"")
        box.set("key", b"\x00\xff" * 1000)
    deadline = time.monotonic() + 20
    while box.get("key") is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert box.get("empty") == b""
    assert box.get("absent") is None
    assert box.get("absent") is None, "asking does not make the key"
    value = box.get("key")
    dist.barrier()
    box.delete(f"absent {rank}")
    box.delete("key")
    dist.barrier()
    assert box.get("key") is None
    dist.barrier()  # rank 0 hosts the store: it leaves last
    return value


def test_key_value_store(gloo):
    assert gloo(use_key_value_store) == [b"\x00\xff" * 1000] * 4


def use_key_value_store_from_threads(rank: int, world_size: int) -> int:
    box = TorchPlatform().ranks.key_value_store
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
    dist.barrier()  # collectives of the training go on beside it
    for thread in threads:
        thread.join()
    dist.barrier()
    return len(errors)


def test_key_value_store_is_usable_from_threads(gloo):
    assert gloo(use_key_value_store_from_threads, world_size=2) == [0, 0]


def subset(rank: int, world_size: int) -> object:
    members = dist.new_group([1, 3])
    others = dist.new_group([0, 2])
    if rank not in (1, 3):
        with pytest.raises(PlatformError, match="not a member"):
            TorchPlatform(members)
    mine = members if rank in (1, 3) else others
    ranks = TorchPlatform(mine).ranks
    assert isinstance(ranks, TorchRanks)
    if ranks.rank == 0:
        ranks.key_value_store.set("from", str(rank).encode())
    gathered = ranks.all_gather_object(rank)
    posted = ranks.key_value_store.get("from")
    return ranks.rank, ranks.global_ranks, gathered, posted, ranks.gather_bytes(bytes([rank])), dist.barrier()


def test_a_subset_numbers_its_own_ranks(gloo):
    assert gloo(subset) == [
        (0, (0, 2), [0, 2], b"0", [b"\x00", b"\x02"], None),
        (0, (1, 3), [1, 3], b"1", [b"\x01", b"\x03"], None),
        (1, (0, 2), [0, 2], b"0", None, None),
        (1, (1, 3), [1, 3], b"1", None, None),
    ]


def default_platform(rank: int, world_size: int) -> int:
    first = default()
    assert default() is first
    assert plugin.load() is first
    first.ranks.key_value_store.set(f"seen/{rank}", b"")
    dist.barrier()
    leftover = dist.distributed_c10d._get_default_store().check(
        [f"hyper_ckpt/key_value_store/{dist.group.WORLD.group_name}"]
    )
    assert not leftover, "the address is gone once all have connected"
    return plugin.active()


def test_default_is_one_platform_per_group(gloo):
    assert gloo(default_platform) == [4] * 4
    assert gloo(default_platform, world_size=3) == [3] * 3


def different_histories(rank: int, world_size: int) -> list[int]:
    """Ranks that have made different numbers of groups, as pipeline stages do."""
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    return TorchPlatform().ranks.all_gather_object(rank)


def test_ranks_may_have_made_different_groups_before(gloo):
    assert gloo(different_histories, world_size=3) == [[0, 1, 2]] * 3


def rank_zero_leaves(rank: int, world_size: int) -> str:
    ranks = TorchPlatform().ranks
    assert ranks.key_value_store.get("absent") is None
    ranks.all_gather_object(None)
    if rank == 0:
        del ranks
        gc.collect()
        dist.barrier()
        return ""
    dist.barrier()
    with pytest.raises(RankFailedError, match="rank 0"):
        ranks.key_value_store.get("absent")
    with pytest.raises(RankFailedError, match="has ended") as caught:
        ranks.all_gather_object(None)
    return str(caught.value)


def test_a_rank_that_is_gone_is_a_failed_rank(gloo):
    assert gloo(rank_zero_leaves, world_size=2)[1]


def stale_address(rank: int, world_size: int, kind: str) -> bytes | None:
    """An address that a group left that is gone does no harm: nobody answers there, or another job's server does."""
    store = dist.distributed_c10d._get_default_store()
    other = KeyValueServer("127.0.0.1")
    port = 9 if kind == "nobody" else other.address.port
    if rank == 0:
        stale = Address("127.0.0.1", port).encoded().decode()
        store.set(f"hyper_ckpt/key_value_store/{dist.group.WORLD.group_name}", stale)
    dist.barrier()
    if rank == 0:
        time.sleep(0.2)
    box = TorchPlatform().ranks.key_value_store
    box.set(f"from/{rank}", b"here")
    dist.barrier()
    value = box.get(f"from/{1 - rank}")
    dist.barrier()
    assert other.keys() == []
    return value


@pytest.mark.parametrize("kind", ["nobody", "another server"])
def test_a_stale_address_is_tried_again(gloo, kind):
    assert gloo(stale_address, kind, world_size=2) == [b"here"] * 2


def named_host(rank: int, world_size: int) -> bytes | None:
    box = TorchPlatform(key_value_host="localhost").ranks.key_value_store
    if rank == 0:
        box.set("key", b"value")
    dist.barrier()
    value = box.get("key")
    dist.barrier()
    return value


def test_the_caller_may_name_rank_zeros_host(gloo):
    assert gloo(named_host, world_size=2) == [b"value"] * 2


def test_the_masters_host_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("MASTER_ADDR", "from.environment")
    files = dist.PrefixStore("a", dist.FileStore(str(tmp_path / "store"), 1))
    assert rendezvous._master_host(files) == "from.environment"
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert rendezvous._master_host(dist.PrefixStore("a", dist.PrefixStore("b", server))) == "localhost"


def test_without_a_process_group_it_is_a_world_of_one():
    ranks = TorchPlatform().ranks
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.all_gather_object(1) == [1]
    assert ranks.gather_bytes(b"x") == [b"x"]
    assert ranks.scatter_bytes([b"y"]) == b"y"
    assert isinstance(ranks.broadcast_into([np.zeros(1, np.uint8)], 0), Done)
    ranks.key_value_store.set("a", b"b")
    assert ranks.key_value_store.get("a") == b"b"
    assert default() is default()
    assert plugin.active() == 0
    assert torch.distributed.is_initialized() is False


def callers_groups(rank: int, world_size: int, kind: str) -> list[object]:
    """The caller's groups take the place of ours, for the same ranks only."""
    sets = [(0, 1), (2, 3), (0, 1, 2, 3), (1, 2)]
    groups = [dist.new_group(list(ranks), backend="gloo") for ranks in sets[:3]]
    if kind == "missing on one":
        groups = groups[1:] if rank == 1 else groups
    if kind == "of others":
        TorchPlatform(groups[rank // 2], groups=groups[2:])
    platform = TorchPlatform(groups=groups)
    made: list[object] = []
    connect = GlooGroup.connect

    def counted(store: object, address: str, ranks: tuple[int, ...], *rest: object) -> object:
        made.append(ranks)
        return connect(store, address, ranks, *rest)

    handles = platform.ranks.groups([(0,)])  # the first call of all: they are compared
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooGroup, "connect", counted)
        handles = platform.ranks.groups(sets)
        for ranks, handle in zip(sets, handles, strict=True):
            if handle is not None:
                buffer = np.full(5, rank, np.uint8)
                platform.ranks.broadcast_into([buffer], ranks[-1], handle).wait()
                assert buffer.tolist() == [ranks[-1]] * 5
    assert platform.ranks.groups(sets) == handles
    return made


def test_groups_of_the_caller(gloo):
    assert gloo(callers_groups, "all") == [[], [(1, 2)], [(1, 2)], []]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing on one", r"group of ranks \(0, 1\), but not on ranks \[1\]"),
        ("of others", "must be ranks of the process group"),
    ],
)
def test_groups_that_ranks_do_not_share_are_refused(gloo, kind, message):
    with pytest.raises(PoolError, match=message):
        gloo(callers_groups, kind)


def load_in_callers_groups(rank: int, world_size: int, path: str) -> tuple[int, int]:
    groups = [dist.new_group([0, 1, 2, 3], backend="gloo")]
    platform = TorchPlatform(groups=groups)
    state = {"w": torch.arange(1 << 18, dtype=torch.float32), "b": torch.ones(3)}
    hyper_ckpt.save(state, path, platform=platform)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    report = hyper_ckpt.load(target, path, platform=platform, share_reads=True)
    assert all(torch.equal(target[name], value) for name, value in state.items())
    return report.shared_boxes, report.bytes_read + report.bytes_received


def test_a_load_in_groups_of_the_caller(gloo, tmp_path):
    found = gloo(load_in_callers_groups, str(tmp_path / "c"))
    assert all(shared and moved == (1 << 20) + 12 for shared, moved in found)
