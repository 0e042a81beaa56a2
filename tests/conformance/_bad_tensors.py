"""For each check of tensors and of whole saves, a platform that breaks what it is about."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from hyper_ckpt.contracts.platform import (
    WHOLE_FINGERPRINT_BYTES,
    Carrier,
    HostTensor,
    LocalShard,
    TensorDescription,
    sampled_fingerprint,
)
from hyper_ckpt.errors import UnsupportedDtypeError
from hyper_ckpt.host_memory import address_of
from hyper_ckpt.layout import Replicated
from hyper_ckpt.testing.conformance.probe import PlatformProbe

from ._bad_stager import OutIgnoresTheStream
from ._parts import DeviceProbe, GoodTensors, Meta, MetaProbe, MetaTensors, PartsProbe, PlainTensors

FEW = ("float32", "float64", "uint8")


class UnknownDtypes(PartsProbe):
    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float32", "float99")


class AlwaysFloat32(GoodTensors):
    def describe(self, value: Any) -> TensorDescription | None:
        got = super().describe(value)
        return got and TensorDescription("float32", got.shape, got.layout)


class Undecided(GoodTensors):
    asked = 0

    def describe(self, value: Any) -> TensorDescription | None:
        self.asked += 1
        got = super().describe(value)
        return got and TensorDescription(got.dtype, got.shape, got.layout, has_memory=self.asked % 2 == 0)


class NumbersAreTensors(GoodTensors):
    def describe(self, value: Any) -> TensorDescription | None:
        return TensorDescription("float64", (), Replicated()) if isinstance(value, float) else super().describe(value)


class ShiftedShards(GoodTensors):
    def local_shards(self, value: Any) -> list[LocalShard]:
        return [LocalShard(tuple(o + 1 for o in s.offsets), s.sizes, s.data) for s in super().local_shards(value)]


class SignedBits(GoodTensors):
    def host_view(self, shard: LocalShard) -> Carrier | None:
        view = super().host_view(shard)
        assert view is not None
        return view.view("i2") if view.dtype == "u2" else view


class ZeroView(GoodTensors):
    def host_view(self, shard: LocalShard) -> Carrier | None:
        return np.zeros_like(super().host_view(shard))


class ForgetsStrides(GoodTensors):
    def host_view(self, shard: LocalShard) -> Carrier | None:
        view = super().host_view(shard)
        assert view is not None
        dense = np.empty(view.shape, view.dtype).strides
        return np.lib.stride_tricks.as_strided(view, view.shape, dense)


class OldView(GoodTensors):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Carrier] = {}

    def host_view(self, shard: LocalShard) -> Carrier | None:
        view = super().host_view(shard)
        assert view is not None
        return self.seen.setdefault(id(shard.data), view.copy())


class WritesToACopy(GoodTensors):
    def writable(self, shard: LocalShard) -> Carrier | None:
        view = super().writable(shard)
        assert view is not None
        return view.copy()


class WritesToAContiguousCopy(GoodTensors):
    def writable(self, shard: LocalShard) -> Carrier | None:
        view = super().writable(shard)
        assert view is not None
        return np.ascontiguousarray(view)


class NewMemory(GoodTensors):
    written = 0

    def writable(self, shard: LocalShard) -> Carrier | None:
        self.written += 1
        return super().writable(shard)

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        return (super().storage_key(shard), self.written)


class EmptyOfFloat32(GoodTensors):
    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        return np.empty(description.shape, np.float32)


class EmptyIsLike(GoodTensors):
    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        return super().empty(description) if like is None else like


class MetaHasMemory(MetaTensors):
    def describe(self, value: Any) -> TensorDescription | None:
        got = super().describe(value)
        return got and TensorDescription(got.dtype, got.shape, got.layout)


class MetaStays(MetaTensors):
    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        return super().empty(description) if not isinstance(like, Meta) else np.zeros(like.shape, np.float64)


class ReadOnly(GoodTensors):
    def writable(self, shard: LocalShard) -> Carrier | None:
        view = super().writable(shard)
        assert view is not None
        view = view[...]
        view.setflags(write=False)
        return view


class WritesAnywhere(GoodTensors):
    def writable(self, shard: LocalShard) -> Carrier | None:
        return self.host_view(shard)


class FewTensors(GoodTensors):
    """Without some of numpy's dtypes."""

    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        if description.dtype not in FEW:
            raise UnsupportedDtypeError(f"no {description.dtype} here")
        return super().empty(description, like)


class ClosestDtype(GoodTensors):
    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        return np.empty(description.shape, description.dtype if description.dtype in FEW else np.float32)


class FewProbe(PartsProbe):
    @property
    def dtypes(self) -> tuple[str, ...]:
        return FEW


class LongPrints(GoodTensors):
    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return super().fingerprint(shards) * 2


class RandomPrints(GoodTensors):
    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return os.urandom(8)


def _large(shards: Sequence[LocalShard]) -> bool:
    return sum(s.data.nbytes for s in shards) >= WHOLE_FINGERPRINT_BYTES


class PrintsOfTheStart(GoodTensors):
    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return sampled_fingerprint([s.data.reshape(-1)[:4].view(np.uint8) for s in shards])


class ConstantPrints(GoodTensors):
    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return bytes(8) if _large(shards) else super().fingerprint(shards)


class PrintsOfStrides(GoodTensors):
    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return sampled_fingerprint([np.frombuffer(repr(shards[0].data.strides).encode(), np.uint8)])


class PrintsOfTheFirst(GoodTensors):
    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return super().fingerprint(shards[:1])


class KeysOfObjects(GoodTensors):
    def storage_key(self, shard: LocalShard) -> Hashable | None:
        return id(shard.data)


class KeysOfShapes(GoodTensors):
    def storage_key(self, shard: LocalShard) -> Hashable | None:
        return (shard.sizes, shard.data.dtype.name)


class KeysOfNothing(GoodTensors):
    def storage_key(self, shard: LocalShard) -> Hashable | None:
        return super().storage_key(shard) or ("empty",)


class KeysOfAddresses(GoodTensors):
    """Strides do not matter."""

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        return (shard.data.__array_interface__["data"][0], shard.sizes) if shard.data.size else None


class KeysOfBlocks(GoodTensors):
    """Offsets do not matter."""

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        base = shard.data if shard.data.base is None else shard.data.base
        return (id(base), shard.sizes, shard.data.strides, shard.data.dtype.name) if shard.data.size else None


class SignaturesOfShapes(GoodTensors):
    def signature(self, value: Any) -> Hashable | None:
        return value.shape


class SignaturesOfAddresses(GoodTensors):
    """Strides and dtypes do not matter."""

    def signature(self, value: Any) -> Hashable | None:
        return (value.__array_interface__["data"][0], value.shape)


class NoKeys(GoodTensors):
    def storage_key(self, shard: LocalShard) -> Hashable | None:
        return None


class PlainWhateverStrides(PlainTensors):
    def plain(self, value: Any) -> HostTensor | None:
        return self.as_it_is(value) if isinstance(value, np.ndarray) and value.size else None

    def as_it_is(self, value: Any) -> HostTensor:
        description = self.describe(value)
        assert description is not None
        return HostTensor(description, address_of(value), value.nbytes)


class PlainReadOnly(PlainWhateverStrides):
    """Repeated rows are taken for an array."""

    def plain(self, value: Any) -> HostTensor | None:
        repeated = isinstance(value, np.ndarray) and 0 in value.strides
        return self.as_it_is(value) if repeated else super(PlainWhateverStrides, self).plain(value)


class PlainCopies(PlainTensors):
    """The address of a copy."""

    def plain(self, value: Any) -> HostTensor | None:
        got = super().plain(value)
        self.copy = np.copy(value)
        return got and HostTensor(got.description, address_of(self.copy), got.nbytes)


Pair = tuple[Callable[[], PlatformProbe | str], Callable[[], PlatformProbe | str]]


def of(tensors: type[GoodTensors]) -> Pair:
    """The bad plugin, and the good one that it was."""
    return (lambda: PartsProbe(tensors)), PartsProbe


def plain(tensors: type[PlainTensors]) -> Pair:
    """The same, of platforms that have plain tensors."""
    return (lambda: PartsProbe(tensors)), lambda: PartsProbe(PlainTensors)


BAD_TENSORS: dict[str, Pair] = {
    "dtypes_are_known": (UnknownDtypes, PartsProbe),
    "describe_says_dtype_shape_and_layout": of(AlwaysFloat32),
    "describe_gives_the_same_answer_twice": of(Undecided),
    "describe_knows_only_tensors": of(NumbersAreTensors),
    "local_shards_of_a_plain_tensor": of(ShiftedShards),
    "host_view_shows_the_bytes": of(SignedBits),
    "host_view_of_strided_tensors": of(ForgetsStrides),
    "host_view_follows_the_work": of(OldView),
    "writes_change_the_tensor": of(WritesToACopy),
    "writes_change_strided_tensors": of(WritesToAContiguousCopy),
    "writes_keep_the_memory": of(NewMemory),
    "empty_makes_what_was_described": of(EmptyOfFloat32),
    "empty_like_a_tensor": of(EmptyIsLike),
    "meta_tensors": ((lambda: MetaProbe(MetaHasMemory)), MetaProbe),
    "views_are_written_through_numpy": of(ReadOnly),
    "empty_refuses_unknown_dtypes": ((lambda: FewProbe(ClosestDtype)), lambda: FewProbe(FewTensors)),
    "overlapping_tensors_are_no_targets": of(WritesAnywhere),
    "fingerprints_are_8_bytes": of(LongPrints),
    "fingerprints_of_equal_contents_are_equal": of(RandomPrints),
    "fingerprints_see_every_byte_of_small_tensors": of(PrintsOfTheStart),
    "fingerprints_of_large_tensors_look_at_the_contents": of(ConstantPrints),
    "fingerprints_ignore_strides": of(PrintsOfStrides),
    "fingerprints_look_at_every_shard": of(PrintsOfTheFirst),
    "storage_keys_of_tied_tensors_are_equal": of(KeysOfObjects),
    "storage_keys_of_other_memory_differ": of(KeysOfShapes),
    "storage_keys_of_other_elements_differ": of(KeysOfAddresses),
    "storage_keys_of_empty_tensors_are_none": of(KeysOfNothing),
    "equal_signatures_mean_equal_answers": of(SignaturesOfShapes),
    "plain_tensors_are_what_the_others_say": plain(PlainWhateverStrides),
    "plain_tensors_are_changed_by_writes": plain(PlainCopies),
    "the_spec_names_the_modules_of_its_tensors": (lambda: "spec_probes:OtherModules", lambda: "spec_probes:Good"),
    "load_gives_the_same_platform_again": (lambda: "spec_probes:ANewOneEachTime", lambda: "spec_probes:Good"),
    "a_state_finds_its_platform": (lambda: "spec_probes:OtherModules", lambda: "spec_probes:Good"),
    "a_state_survives": of(WritesToACopy),
    "a_state_is_read_elsewhere": of(ZeroView),
    "strided_tensors_survive": of(WritesToAContiguousCopy),
    "work_before_a_save_is_in_it": ((lambda: DeviceProbe(OutIgnoresTheStream)), DeviceProbe),
    "tied_tensors_are_stored_once": of(NoKeys),
    "targets_without_memory_are_replaced": ((lambda: MetaProbe(MetaStays)), MetaProbe),
}

# More than one way to break a promise.
MORE_BAD_TENSORS: list[tuple[str, Pair]] = [
    ("storage_keys_of_other_elements_differ", of(KeysOfBlocks)),
    ("equal_signatures_mean_equal_answers", of(SignaturesOfAddresses)),
    ("plain_tensors_are_what_the_others_say", plain(PlainReadOnly)),
    ("plain_tensors_are_what_the_others_say", plain(PlainCopies)),
]
