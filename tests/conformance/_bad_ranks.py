"""For each check of a world, ranks or tensors that break what it is about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hyper_ckpt import ShardedTensor
from hyper_ckpt.contracts.platform import (
    ByteBuffer,
    Carrier,
    Done,
    KeyValueStore,
    LocalShard,
    Pending,
    Ranks,
    TensorDescription,
    Tensors,
)
from hyper_ckpt.dtypes import numpy_dtype
from hyper_ckpt.errors import RankFailedError, UnsupportedLayoutError
from hyper_ckpt.layout import Boxes
from hyper_ckpt.testing.conformance.probe import PlatformProbe
from hyper_ckpt.testing.thread_ranks import WorldBrokenError

from ._bad_tensors import WritesToACopy
from ._parts import GoodKeyValueStore, GoodRanks, GoodTensors, PartsProbe


class Renumbered(GoodRanks):
    @property
    def rank(self) -> int:
        return self.size - 1 - super().rank


class Reversed(GoodRanks):
    def all_gather_object(self, value: Any) -> list[Any]:
        return super().all_gather_object(value)[::-1]


class CutsValues(GoodRanks):
    def all_gather_object(self, value: Any) -> list[Any]:
        return super().all_gather_object(value[: 1 << 20] if isinstance(value, bytes) else value)


class PadsParts(GoodRanks):
    """As where every part is sent at the size of the largest one."""

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        gathered = super().gather_bytes(data)
        return gathered and [each.ljust(max(map(len, gathered)), b"\0") for each in gathered]

    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        return super().scatter_bytes(parts and [each.ljust(max(map(len, parts)), b"\0") for each in parts])


class AlwaysFromZero(GoodRanks):
    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        return super().broadcast_into(buffers, 0 if group is None else src, group)


class FirstMib(GoodRanks):
    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        return super().broadcast_into([buffer[: 1 << 20] for buffer in buffers], src, group)


class OneBehind(GoodRanks):
    """A buffer is filled when the next broadcast is waited for."""

    behind: tuple[Any, Any] = ((), ())

    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        for buffer, data in zip(*self.behind, strict=True):
            buffer[...] = data
        received = [buffer.copy() for buffer in buffers]
        super().broadcast_into(received, src, group)
        self.behind = (buffers, received)
        return Done()


class IgnoresTheGroup(GoodRanks):
    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        return super().broadcast_into(buffers, src)


class SourceInTheGroup(GoodRanks):
    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        return super().broadcast_into(buffers, src if group is None else group[src % len(group)], group)


class EverybodyIsMember(GoodRanks):
    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        super().groups(rank_sets)
        return list(rank_sets)


@dataclass(eq=False)
class Handle:
    ranks: tuple[int, ...]


class NewHandles(GoodRanks):
    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        return [each and Handle(each) for each in super().groups(rank_sets)]


class NoSingles(GoodRanks):
    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        return [None if len(ranks) == 1 else each for ranks, each in zip(rank_sets, super().groups(rank_sets))]  # noqa: B905


class ReturnsWhatItHas(GoodRanks):
    def all_gather_object(self, value: Any) -> list[Any]:
        try:
            return super().all_gather_object(value)
        except WorldBrokenError:
            return [None] * self.size


def with_store(kind: type[GoodKeyValueStore]) -> Callable[[Ranks], Ranks]:
    class WithKeyValueStore(GoodRanks):
        @cached_property
        def key_value_store(self) -> KeyValueStore:  # type: ignore[override]
            return kind(self.inner.key_value_store, self.inner)

    return WithKeyValueStore


class TextOnly(GoodKeyValueStore):
    def set_many(self, items: Mapping[str, bytes]) -> None:
        self.inner.set_many({key: value.decode(errors="replace").encode() for key, value in items.items()})


class Blocks(GoodKeyValueStore):
    """Waits for 15 s whatever it is asked, or until the test is over."""

    over = threading.Event()

    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        for _ in range(75):
            if self.over.is_set():
                raise RankFailedError("the test is over")
            if found := self.inner.get_many(keys, 0.2):
                return found
        return {}


class NeverWaits(GoodKeyValueStore):
    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        return self.inner.get_many(keys)


class KeepsAll(GoodKeyValueStore):
    def delete(self, *keys: str) -> None:
        return None


class KeepsSome(GoodKeyValueStore):
    """Deletes in pages, and only the first."""

    def delete_prefix(self, prefix: str) -> None:
        self.inner.delete(*(f"{prefix}{n}" for n in range(100)))


class MixesUpThreads(GoodKeyValueStore):
    """One answer for all who ask at the same time."""

    answer: dict[str, bytes] = {}  # noqa: RUF012

    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        self.answer = self.inner.get_many(keys, timeout)
        time.sleep(0.001)
        return dict(zip(keys, self.answer.values(), strict=False))


class SetTogether(GoodKeyValueStore):
    def set_many(self, items: Mapping[str, bytes]) -> None:
        self.inner.set_many(items)
        self.ranks.all_gather_object(None)


class OneLock(GoodRanks):
    """The key-value store waits while this rank is in a collective."""

    def __init__(self, inner: Ranks) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()

    @cached_property
    def key_value_store(self) -> KeyValueStore:  # type: ignore[override]
        return LockedKeyValueStore(self.inner.key_value_store, self)

    def all_gather_object(self, value: Any) -> list[Any]:
        with self.lock:
            return super().all_gather_object(value)


class LockedKeyValueStore(GoodKeyValueStore):
    def set_many(self, items: Mapping[str, bytes]) -> None:
        with self.ranks.lock:
            self.inner.set_many(items)


class LosesNews(GoodKeyValueStore):
    def set_many(self, items: Mapping[str, bytes]) -> None:
        if self.ranks.rank != self.ranks.world_size - 1 or next(iter(items)).startswith("silent/"):
            self.inner.set_many(items)


class ShardsAtZero(GoodTensors):
    def local_shards(self, value: Any) -> list[LocalShard]:
        return [LocalShard((0,) * len(s.sizes), s.sizes, s.data) for s in super().local_shards(value)]


class TrustsParts(GoodTensors):
    """Takes a part for what it should be."""

    def describe(self, value: Any) -> TensorDescription | None:
        try:
            return super().describe(value)
        except UnsupportedLayoutError:
            return TensorDescription("float32", value.global_shape, Boxes((((0, 0), value.global_shape),)))


class WholeLikeSharded(GoodTensors):
    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        if isinstance(like, ShardedTensor):
            return np.empty(description.shape, numpy_dtype(description.dtype))
        return super().empty(description, like)


class ShardsAreCopies(GoodTensors):
    def writable(self, shard: LocalShard) -> Carrier | None:
        view = super().writable(shard)
        return view if view is None else view.copy()


Pair = tuple[Callable[[], PlatformProbe | str], Callable[[], PlatformProbe | str]]


def of(ranks: Callable[[Ranks], Ranks]) -> Pair:
    return (lambda: PartsProbe(ranks=ranks)), PartsProbe


def over(tensors: type[Tensors]) -> Pair:
    return (lambda: PartsProbe(tensors)), PartsProbe


BAD_RANKS: dict[str, Pair] = {
    "ranks_are_numbered": of(Renumbered),
    "all_gather_object_is_in_rank_order": of(Reversed),
    "all_gather_object_of_unequal_sizes": of(CutsValues),
    "gather_bytes_of_unequal_sizes": of(PadsParts),
    "scatter_bytes_of_unequal_sizes": of(PadsParts),
    "broadcast_from_every_rank": of(AlwaysFromZero),
    "broadcast_of_large_buffers": of(FirstMib),
    "broadcasts_in_flight": of(OneBehind),
    "broadcasts_in_disjoint_groups": of(IgnoresTheGroup),
    "broadcasts_in_overlapping_groups": of(SourceInTheGroup),
    "groups_of_others_are_none": of(EverybodyIsMember),
    "groups_are_kept": of(NewHandles),
    "a_group_of_one": of(NoSingles),
    "the_key_value_store_carries_bytes": of(with_store(TextOnly)),
    "an_absent_key_is_none": of(with_store(Blocks)),
    "deleted_keys_are_absent": of(with_store(KeepsAll)),
    "a_get_waits_until_the_key_is_set": of(with_store(NeverWaits)),
    "keys_are_deleted_by_prefix": of(with_store(KeepsSome)),
    "the_key_value_store_serves_several_threads": of(with_store(MixesUpThreads)),
    "the_key_value_store_needs_no_other_rank": of(with_store(SetTogether)),
    "the_key_value_store_serves_a_rank_in_a_collective": of(OneLock),
    "active_says_how_many_ranks_there_are": (lambda: "spec_probes:AlwaysInactive", lambda: "spec_probes:Good"),
    "load_gives_the_joined_group": (lambda: "spec_probes:LoadsWhatWasThereFirst", lambda: "spec_probes:Good"),
    "all_ranks_save_and_load": over(WritesToACopy),
    "sharded_tensors_say_where_they_lie": over(ShardsAtZero),
    "misshapen_parts_are_refused": over(TrustsParts),
    "sharded_tensors_survive": over(ShardsAreCopies),
    "empty_like_a_sharded_tensor": over(WholeLikeSharded),
    "a_rank_that_fails_is_named": of(with_store(LosesNews)),
    "a_silent_rank_is_named": of(with_store(Blocks)),
    "collectives_fail_in_time": of(ReturnsWhatItHas),
}
