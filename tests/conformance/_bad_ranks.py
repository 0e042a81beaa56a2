"""For each check of a world, ranks or tensors that break what it is about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hyper_ckpt import ShardedTensor
from hyper_ckpt.contracts.platform import (
    ByteBuffer,
    Carrier,
    Done,
    LocalShard,
    Mailbox,
    Pending,
    Ranks,
    TensorDescription,
    Tensors,
)
from hyper_ckpt.dtypes import numpy_dtype
from hyper_ckpt.errors import UnsupportedLayoutError
from hyper_ckpt.layout import Boxes
from hyper_ckpt.testing.conformance.probe import PlatformProbe
from hyper_ckpt.testing.thread_ranks import WorldBrokenError

from ._bad_tensors import WritesToACopy
from ._parts import GoodMailbox, GoodRanks, GoodTensors, PartsProbe


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


def with_mailbox(kind: type[GoodMailbox]) -> Callable[[Ranks], Ranks]:
    class WithMailbox(GoodRanks):
        @cached_property
        def mailbox(self) -> Mailbox:  # type: ignore[override]
            return kind(self.inner.mailbox, self.inner)

    return WithMailbox


class TextOnly(GoodMailbox):
    def set(self, key: str, value: bytes) -> None:
        self.inner.set(key, value.decode(errors="replace").encode())


class Blocks(GoodMailbox):
    def get(self, key: str) -> bytes | None:
        for _ in range(300):
            value = self.inner.get(key)
            if value is not None:
                return value
            time.sleep(0.05)
        return None


class KeepsAll(GoodMailbox):
    def delete(self, key: str) -> None:
        return None


class MixesUpThreads(GoodMailbox):
    """One answer for all who ask at the same time."""

    answer: bytes | None = None

    def get(self, key: str) -> bytes | None:
        self.answer = self.inner.get(key)
        time.sleep(0.001)
        return self.answer


class SetTogether(GoodMailbox):
    def set(self, key: str, value: bytes) -> None:
        self.inner.set(key, value)
        self.ranks.all_gather_object(None)


class OneLock(GoodRanks):
    """The mailbox waits while this rank is in a collective."""

    def __init__(self, inner: Ranks) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()

    @cached_property
    def mailbox(self) -> Mailbox:  # type: ignore[override]
        return LockedMailbox(self.inner.mailbox, self)

    def all_gather_object(self, value: Any) -> list[Any]:
        with self.lock:
            return super().all_gather_object(value)


class LockedMailbox(GoodMailbox):
    def set(self, key: str, value: bytes) -> None:
        with self.ranks.lock:
            self.inner.set(key, value)


class LosesNews(GoodMailbox):
    def set(self, key: str, value: bytes) -> None:
        if self.ranks.rank != self.ranks.world_size - 1 or key.startswith("silent/"):
            self.inner.set(key, value)


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
    "the_mailbox_carries_bytes": of(with_mailbox(TextOnly)),
    "an_absent_key_is_none": of(with_mailbox(Blocks)),
    "deleted_keys_are_absent": of(with_mailbox(KeepsAll)),
    "the_mailbox_serves_several_threads": of(with_mailbox(MixesUpThreads)),
    "the_mailbox_needs_no_other_rank": of(with_mailbox(SetTogether)),
    "the_mailbox_serves_a_rank_in_a_collective": of(OneLock),
    "active_says_how_many_ranks_there_are": (lambda: "spec_probes:AlwaysInactive", lambda: "spec_probes:Good"),
    "load_gives_the_joined_group": (lambda: "spec_probes:LoadsWhatWasThereFirst", lambda: "spec_probes:Good"),
    "all_ranks_save_and_load": over(WritesToACopy),
    "sharded_tensors_say_where_they_lie": over(ShardsAtZero),
    "misshapen_parts_are_refused": over(TrustsParts),
    "sharded_tensors_survive": over(ShardsAreCopies),
    "empty_like_a_sharded_tensor": over(WholeLikeSharded),
    "a_rank_that_fails_is_named": of(with_mailbox(LosesNews)),
    "a_silent_rank_is_named": of(with_mailbox(Blocks)),
    "collectives_fail_in_time": of(ReturnsWhatItHas),
}
