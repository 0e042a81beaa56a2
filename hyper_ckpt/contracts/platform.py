"""What a platform supplies: ranks, tensors, staging. Knows nothing of files or plans."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from hyper_ckpt.casts import convert
from hyper_ckpt.contracts.objects import Objects
from hyper_ckpt.errors import RankFailedError
from hyper_ckpt.layout import Layout

Carrier = npt.NDArray[Any]
ByteBuffer = npt.NDArray[np.uint8]


class Pending(Protocol):
    """Something that was started. `wait` returns when it is complete, or raises what went wrong.

    It may be called from any thread, and again; whoever started something waits before using what it works on.
    """

    def wait(self) -> None: ...


class Done:
    """A `Pending` that is complete."""

    def wait(self) -> None:
        return None


@dataclass(frozen=True)
class TensorDescription:
    """What a platform says of a tensor.

    `dtype` is a name of `hyper_ckpt.dtypes`; `shape` the global shape. `has_memory` is False for a
    target that is only a description (torch's meta device): a load replaces it by `Tensors.empty`.
    `save_refusal` says why a save refuses a tensor that a load can fill: what would be lost, and what to do.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    has_memory: bool = True
    save_refusal: str | None = None


class HostTensor(NamedTuple):
    """A tensor that is whole on this rank and lies row-major, without gaps, in host memory that may be written: the
    address and bytes of that."""

    description: TensorDescription
    address: int
    nbytes: int


class LocalShard(msgspec.Struct, frozen=True, eq=False):
    """One box of a tensor that lies on this rank, `data` in the platform's own type."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Any


@dataclass(frozen=True, eq=False)
class TensorParts:
    """What a tensor that is made of other tensors is made of.

    Args:
        inner: these tensors, by name; they may be made of others themselves.
        kind: the name of its class, "package.module.Class".
        context: what it says of itself besides: plain values. They are saved, and a load compares them with the
            target's; they are never used to make anything.
        rebuild: makes a tensor of the same class and context of other inner tensors, by name.
    """

    inner: Mapping[str, Any]
    kind: str
    context: Any
    rebuild: Callable[[Mapping[str, Any]], Any]


class KeyValueStore(ABC):
    """Small named values that all ranks see: where they meet, and how they learn that one of them failed.

    Keys are ASCII; values at most a few MiB. What a rank has set, every rank gets from then on. No call waits for
    another rank, not even one that is in a collective, except `get` and `get_many` for as long as they are asked to.
    Usable from any thread, several at once: a call that waits holds up no other one.

    Usually the process of rank 0 hosts it: a save or load ends on rank 0 only when the others have heard how it
    ended, or are gone. A call that gets no answer from there raises `RankTimeoutError` after `Ranks.timeout` seconds,
    or what `within` says, also where that process is stopped or its host is frozen; one that cannot reach it raises
    `RankFailedError`. Once a call got no answer, later ones give up within seconds until there is one again.
    `hyper_ckpt.key_value` has a server and a client that do all this over TCP.
    """

    @abstractmethod
    def set_many(self, items: Mapping[str, bytes]) -> None:
        """Stores values for every rank to see, all at once."""

    @abstractmethod
    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        """Those of the keys that are set, as they are at one moment. Where none is, waits until one is, at most
        `timeout` seconds; then {}."""

    @abstractmethod
    def delete(self, *keys: str) -> None:
        """Forgets keys; absent ones are fine."""

    @abstractmethod
    def delete_prefix(self, prefix: str) -> None:
        """Forgets all keys that begin so."""

    def set(self, key: str, value: bytes) -> None:
        """Stores one value."""
        self.set_many({key: value})

    def get(self, key: str, timeout: float = 0.0) -> bytes | None:
        """The value, as soon as it is set; None where it is not within `timeout` seconds."""
        return self.get_many((key,), timeout).get(key)

    def within(self, seconds: Callable[[], float]) -> KeyValueStore:
        """The same store, for calls that wait so long for an answer, asked for each anew. Inherited: this object, for
        stores that always answer at once."""
        return self


class Ranks(ABC):
    """The ranks of one process group, numbered 0..world_size-1, and their collectives.

    Collectives are called in the caller's thread only, by all ranks in the same order, and only after all have met in
    the key-value store. They move control data, and tensors that several ranks read together: the training's own group
    is never used. One that cannot complete, since a rank has ended or does not come, raises within
    `timeout` and never hangs: any exception, best `RankFailedError` or `RankTimeoutError` with the ranks' numbers.

    `timeout`: seconds after which a collective, or the first connection, whose peers do not come fails, counted from
    the call; for a `Pending`, from the call that made it. Every save and load sets its own, before its first call.

    `fixed_timeout`: seconds after which collectives fail whatever `timeout` is, where the library below has a limit of
    its own that cannot be set; None: there is none.

    `broadcast_bandwidth`: bytes per second that `broadcast_into` brings to each member of a group, an estimate; None:
    unknown. State it where broadcasts are slow, so that nothing large is sent by them.
    """

    timeout: float = 1800.0
    fixed_timeout: float | None = None
    broadcast_bandwidth: float | None = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's number inside the group."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def key_value_store(self) -> KeyValueStore:
        """The group's key-value store."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Small values of every rank, in rank order: None, bools, numbers, texts, bytes, and lists and dicts of these;
        tuples arrive as lists. What peers send is decoded (`unpacked`), never unpickled."""

    @abstractmethod
    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Everybody's bytes at rank 0 (None elsewhere)."""

    @abstractmethod
    def scatter_bytes(self, parts: Sequence[bytes] | None) -> bytes:
        """Part r of rank 0's `parts` at rank r."""

    @abstractmethod
    def broadcast_into(self, buffers: Sequence[ByteBuffer], src: int, group: Any = None) -> Pending:
        """Sends rank `src`'s buffers into the same-sized buffers of every member of `group` (None: all ranks).

        Called by the members only, and may block until they have come. Buffers are contiguous uint8 host arrays of any
        number and size, 0 included, those of `src` perhaps read-only; not to be touched until the Pending is waited
        for. `src` counts in this object's ranks, also in a group.
        """

    @abstractmethod
    def groups(self, rank_sets: Sequence[tuple[int, ...]]) -> list[Any]:
        """A handle per rank set, for `broadcast_into`; None for sets this rank is not in. It may be anything but None,
        only this object looks into it.

        All ranks call it, with the same sorted sets in the same order. Handles are kept and reused: the same set gives
        the same group. A set may have one member. What can fail in connecting a group fails here.
        """


class Tensors(ABC):
    """How a framework's tensors look from outside. All methods are called in the caller's thread."""

    @abstractmethod
    def describe(self, value: Any) -> TensorDescription | None:
        """Describes a tensor of this platform; None for anything else.

        Whether it is None must depend on the value's type alone. Asked once for each value and save or load, again
        only where it raised. It must not talk to other ranks, which may not be there.

        Raises:
            UnsupportedStateError: it is a tensor, but of a kind that cannot be stored (why is in the message).
        """

    def may_have_parts(self, kind: type) -> bool:
        """Whether tensors of a class may be made of others, so that `parts` is to be asked. Asked once for each class
        and save or load. Inherited: False."""
        return False

    def parts(self, value: Any) -> TensorParts | None:
        """The tensors that a tensor is made of, which are saved and filled in its stead, under its name and theirs.
        None (inherited): it is stored as it is. Like `describe` it must not talk to other ranks.

        Raises:
            UnsupportedStateError: it is made of others, but cannot be taken apart.
        """
        return None

    @abstractmethod
    def local_shards(self, value: Any) -> list[LocalShard]:
        """The boxes that this rank holds, none or empty ones included, checked against the layout.

        Asked at most once for each value and save or load, and like `describe` of this rank alone.

        Raises:
            UnsupportedLayoutError: what is here is not what the layout says.
        """

    @abstractmethod
    def host_view(self, shard: LocalShard) -> Carrier | None:
        """The shard's memory as an array of carriers of shape `shard.sizes`, strided as it lies (any strides), valid
        while `shard.data` lives and complete when this returns. None where it is not in host memory: such shards are
        copied whole by `Stager.copy_out`."""

    @abstractmethod
    def writable(self, shard: LocalShard) -> Carrier | None:
        """Like `host_view`, but writes through it, from any thread, change the tensor in place. None: use
        `Stager.copy_in`.

        Raises:
            TargetError: the tensor cannot be written into.
        """

    @abstractmethod
    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        """8 bytes that differ where contents differ, in any of the shards: whole under 1 MiB, sampled above
        (`hyper_ckpt.contracts.platform.sampled_fingerprint` does it for host memory).

        Equal contents have equal ones, however they lie in memory: elements count in row-major order. It sees the work
        queued before, and is asked only where several ranks may hold the same.
        """

    @abstractmethod
    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        """A new tensor with memory, of any contents. `like` is a value of the platform to copy device and distribution
        from; a load passes a target without memory, which the new one replaces.

        Raises:
            UnsupportedDtypeError: the framework has no such dtype.
        """

    @abstractmethod
    def storage_key(self, shard: LocalShard) -> Hashable | None:
        """Equal for two shards that are the same elements of the same memory, and different for any others, also of the
        same memory: offset, shape, strides and dtype belong to it (`hyper_ckpt.builtin.numpy_tensors.memory_key`). None
        for empty shards. Tensors with one key are stored once: a key that is too equal loses one in silence, one
        that is too different only costs space. Of tensors without memory: equal where they would be, None where that
        cannot be told."""

    def signature(self, value: Any) -> Hashable | None:
        """Equal for two tensors only if `describe` says the same of them, `local_shards` gives the same boxes, and
        `storage_key` the same keys. A save whose tensors have the signatures of an earlier one describes none of them
        again; so it must be much cheaper than these three. It keeps no tensor alive. None (inherited): unknown."""
        return None

    def plain(self, value: Any) -> HostTensor | None:
        """A tensor of which one call says all: its description, and where it lies, complete when this returns like a
        `host_view`. Neither empty nor on a device, none that `describe` or `writable` refuses. Its memory stays there
        while the value lives and is not resized or set to other memory.

        Saves and loads ask it first, and `describe`, `local_shards`, `storage_key` and `writable` only where it is None
        (inherited), as for whatever is not so simple. It must say what these would: the conformance suite compares
        them. A class that overrides one of them overrides this as well. Worth having where tensors are very many."""
        return None

    def cast(self, values: Carrier, dtype: str, to: str) -> Carrier:
        """Elements converted from one dtype to another, for a load that was asked to cast: bit for bit as the framework
        converts its tensors, where that is not as numpy does it (inherited).

        Args:
            values: carriers of elements of `dtype`, one-dimensional and contiguous, a few MiB at most.
            to: another dtype, such that `hyper_ckpt.casts.may_cast(dtype, to)`.

        Returns:
            As many carriers of elements of `to`, in memory of their own.
        """
        return convert(values, dtype, to)

    def before_writes(self, values: Sequence[Any]) -> None:
        """Called with all targets of a load (perhaps none) before anything is read into them. For those that are plain
        nobody asks `writable`: does what that does besides returning memory, such as telling autograd. May raise, as
        that; but what cannot be a target at all is not plain."""
        return None


class Stager(ABC):
    """Moves bytes between device memory and host buffers.

    `copy_out` and `copy_in` are called in the thread whose work they follow, the caller's: streams belong to threads.
    `buffer`, `release` and `Pending.wait` come from any thread, several at once. A buffer belongs to whoever asked for
    it until it is released.
    """

    @abstractmethod
    def buffer(self, nbytes: int) -> ByteBuffer:
        """A host buffer of at least `nbytes` (pinned where that helps), contiguous, writeable, of any contents, pooled:
        `hyper_ckpt.builtin.host_stager.BufferPool` does that."""

    @abstractmethod
    def release(self, buffer: ByteBuffer) -> None:
        """Gives back what `buffer` returned, once; only after each Pending on it was waited for, also where that
        raised."""

    @abstractmethod
    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        """Copies the shard, row-major, to the start of `buffer`; starts after the work queued on the caller's stream.

        The shard's memory and the buffer stay as they are until the Pending was waited for: what the caller queues
        on the tensor before that is not held back.
        """

    @abstractmethod
    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        """Copies row-major bytes from the start of `buffer` into the shard, after the work queued on the caller's
        stream (readers of the old values included); the caller's stream is ordered behind it, with or without a wait.
        """


@dataclass(eq=False)
class Platform:
    """One process group's view of a framework: the contracts, and what belongs to the group.

    `operations` numbers the saves and loads of the group, the same on every rank; `kept` is what the library keeps
    for it from call to call.
    """

    name: str
    ranks: Ranks
    tensors: Tensors
    stager: Stager
    objects: Objects = field(default_factory=Objects)
    operations: Iterator[int] = field(default_factory=itertools.count)
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlatformSpec:
    """How a plugin announces a platform. Only `load` may import the framework.

    Args:
        name: unique, e.g. "torch".
        modules: top-level modules whose types are this platform's tensors, e.g. ("torch", "torch_npu").
        active: world size of the framework's process group as seen in `sys.modules`; 0 if it is not
            imported or not initialised. Imports nothing.
        load: the Platform of the default process group, the same instance while that group lives: it has the group's
            connections, buffers, and the number of its saves and loads. Another one for another group.
        install: the command that installs what `load` needs.
        probe: "module:callable" that makes a `hyper_ckpt.testing.conformance.PlatformProbe`; imported only by
            `hyper-ckpt conformance`.
    """

    name: str
    modules: tuple[str, ...]
    active: Callable[[], int]
    load: Callable[[], Platform]
    install: str
    probe: str | None = None


def packed(value: Any) -> bytes:
    """A value of `Ranks.all_gather_object` as bytes."""
    return msgspec.msgpack.encode(value)


def unpacked(data: bytes) -> Any:
    """The value that `packed` made these bytes of. Nothing that they hold is run.

    Raises:
        RankFailedError: they are no such value.
    """
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RankFailedError(f"a rank sent {len(data)} bytes that are no value: {error}") from error


WHOLE_FINGERPRINT_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def sampled_fingerprint(views: Sequence[Carrier]) -> bytes:
    """8 bytes over arrays in host memory: all bytes under 1 MiB, else 64 evenly spaced pieces of 4 KiB."""
    import xxhash

    digest = xxhash.xxh3_64()
    for view in views:
        flat = np.ascontiguousarray(view) if view.nbytes < WHOLE_FINGERPRINT_BYTES else view
        if flat.nbytes < WHOLE_FINGERPRINT_BYTES:
            digest.update(flat.reshape(-1).view(np.uint8).data)
            continue
        count = max(_SAMPLE_BYTES // flat.itemsize, 1)
        for start in np.linspace(0, flat.size - count, _SAMPLES).astype(np.int64):
            part = (
                flat.reshape(-1)[start : start + count] if flat.flags.c_contiguous else flat.flat[start : start + count]
            )
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
    return digest.digest()
