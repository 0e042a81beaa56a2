"""What every call needs: where, with which platform and store, and how errors find their way."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from hyper_ckpt.agreement import Operation, in_step
from hyper_ckpt.builtin.composite import CompositeTensors
from hyper_ckpt.builtin.host_stager import BufferPool
from hyper_ckpt.builtin.numpy_platform import SingleRank
from hyper_ckpt.builtin.numpy_tensors import NumpyTensors
from hyper_ckpt.contracts.objects import Form
from hyper_ckpt.contracts.platform import (
    ByteBuffer,
    Carrier,
    HostTensor,
    LocalShard,
    Platform,
    Stager,
    TensorDescription,
    TensorParts,
    Tensors,
)
from hyper_ckpt.engine.in_flight import InFlight
from hyper_ckpt.engine.shared_memory import SharedBuffers
from hyper_ckpt.engine.stage import from_host
from hyper_ckpt.engine.writer_process import WriterProcess
from hyper_ckpt.errors import ManifestError, PlatformError, UnsupportedStateError
from hyper_ckpt.layout import Boxes, MeshLayout, Shard
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.options import DEFAULT_TIMEOUT
from hyper_ckpt.registry import registry
from hyper_ckpt.state import MakeTensor, Node, PartsOf, RawNode, decode_tree
from hyper_ckpt.state.tree import KeyedNode
from hyper_ckpt.state.walk import tensor_names

CheckpointId = str | os.PathLike[str]
T = TypeVar("T")

MAX_TIMEOUT = 10 * 365 * 86400.0
"""Seconds that every clock and every framework can count; what is longer means "for ever"."""


def resolve_id(checkpoint_id: CheckpointId | None, own: CheckpointId | None, what: str) -> str:
    """The path or URL that a call speaks of.

    Raises:
        ValueError: none is given.
    """
    if not isinstance(checkpoint_id, str | os.PathLike | None):
        raise TypeError(
            f"checkpoint_id must be a path or URL, not a {type(checkpoint_id).__name__}; the state comes first"
        )
    chosen = own if checkpoint_id is None else checkpoint_id
    if chosen is None:
        raise ValueError(f"give checkpoint_id=, or a {what} that has a path")
    return os.fspath(chosen)


def resolve_platform(platform: Platform | str | None, state: Any, no_dist: bool, *, saves: bool = False) -> Platform:
    """The platform of a call; with `no_dist`, its tensors in a world of one.

    Args:
        saves: whether the call saves. Where the process group was forgotten, each process may load alone, with a
            warning, but must not save: each would save over the others.

    Raises:
        PlatformError: the call saves, there are other processes, and no process group connects them.
        CheckpointError: the platform is not there, or does not load.
    """
    check_type("platform", platform, Platform, str, type(None))
    named = registry().platform(platform) if isinstance(platform, str) else platform
    chosen = named or registry().choose(state)
    if no_dist:
        return kept(chosen, "alone", lambda: _alone(chosen))
    if named is None and chosen.ranks.world_size == 1:
        _check_alone(chosen, saves)
    return chosen


def _alone(platform: Platform) -> Platform:
    """The same in a world of one."""
    return Platform(platform.name, SingleRank(), platform.tensors, platform.stager, platform.objects)


def _check_alone(chosen: Platform, saves: bool) -> None:
    """Refuses a save, and warns of anything else, where other processes do the same with nothing between them."""
    others = _processes_beside(chosen)
    if others and saves:
        raise PlatformError(
            f"{others}: each process would save as if it were alone, over the others. Initialise the process group "
            "first; or pass no_dist=True where this process is to save alone, or platform= for the ranks that save"
        )
    if others:
        _warn_once(f"{others}: this process loads alone. Initialise it first, or say so with no_dist=True")


def _processes_beside(chosen: Platform) -> str:
    """What says that a platform without ranks is one of several processes; empty if nothing does."""
    groups = registry().process_groups()
    for name, world_size in groups.items():
        if world_size > 1:
            return (
                f"{name} has a process group of {world_size} ranks, but this state is {chosen.name}'s, which has none"
            )
    sizes = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "MS_WORKER_NUM")} if not groups else {}
    for variable, size in sizes.items():
        if size.isdecimal() and int(size) > 1:
            return f"{variable}={size}, but no process group is initialised"
    return ""


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=5)


def check_type(name: str, value: object, *kinds: type) -> None:
    """Raises TypeError for an argument of another type."""
    if not isinstance(value, kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}")


def check_number(name: str, value: object, least: int) -> int | None:
    """An integer from `least` on as a plain int, numpy's too, or None; raises for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer or None, not {type(value).__name__}")
    number = int(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return number


def check_timeout(timeout: object) -> float:
    """A positive number of seconds; raises for anything else."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not float(timeout) > 0:
        raise ValueError(f"timeout must be above 0 seconds, not {timeout}")
    return float(timeout)


def in_flight(platform: Platform) -> InFlight:
    """The saves of a platform that are finished in the background."""
    return kept(platform, "in flight", InFlight)


def kept(platform: Platform, name: str, make: Callable[[], T]) -> T:
    """What is kept for a platform under a name, made when it is first asked for, by whatever thread."""
    if name not in platform.kept:
        platform.kept.setdefault(name, make())
    found: T = platform.kept[name]
    return found


class SharedStage:
    """A process that writes for a platform, and the shared memory through which it sees what."""

    def __init__(self) -> None:
        shared = SharedBuffers()
        self._pool = BufferPool(shared.allocate)
        self._process = WriterProcess(shared)
        self.write = self._process.write

    def buffer(self, nbytes: int) -> ByteBuffer:
        """A buffer of at least `nbytes`."""
        return self._pool.take(nbytes)

    def release(self, buffer: ByteBuffer) -> None:
        """Takes it back."""
        self._pool.give(buffer)


def shared_stage(platform: Platform) -> SharedStage:
    """The platform's process that writes."""
    return kept(platform, "shared stage", SharedStage)


def all_tensors(platform: Platform) -> Tensors:
    """The platform's tensors, numpy arrays and sharded values."""
    if isinstance(platform.tensors, CompositeTensors):
        return platform.tensors
    return CompositeTensors([platform.tensors, NumpyTensors()])


class RememberedTensors(Tensors):
    """Asks each value once what it is and where its shards are, for as long as one save or load takes.

    Args:
        inner: whom to ask.
    """

    def __init__(self, inner: Tensors) -> None:
        self._inner = inner
        self._plain: dict[int, HostTensor | None] = {}
        self._described: dict[int, TensorDescription | None] = {}
        self._shards: dict[int, list[LocalShard]] = {}
        self._keys: dict[int, Hashable | None] = {}
        self._kept: list[Any] = []  # what was asked: a freed one's id would come again

    def plain(self, value: Any) -> HostTensor | None:
        if id(value) not in self._plain:
            self._plain[id(value)] = self._inner.plain(value)
            self._kept.append(value)
        return self._plain[id(value)]

    def cast(self, values: Carrier, dtype: str, to: str) -> Carrier:
        return self._inner.cast(values, dtype, to)

    def before_writes(self, values: Sequence[Any]) -> None:
        self._inner.before_writes(values)

    def describe(self, value: Any) -> TensorDescription | None:
        plain = self.plain(value)
        if plain is not None:
            return plain.description
        if id(value) not in self._described:
            self._described[id(value)] = self._inner.describe(value)
        return self._described[id(value)]

    def may_have_parts(self, kind: type) -> bool:
        return self._inner.may_have_parts(kind)

    def parts(self, value: Any) -> TensorParts | None:
        return self._inner.parts(value)

    def local_shards(self, value: Any) -> list[LocalShard]:
        if id(value) not in self._shards:
            self._shards[id(value)] = self._inner.local_shards(value)
            self._kept.append(value)
        return self._shards[id(value)]

    def host_view(self, shard: LocalShard) -> Carrier | None:
        return self._inner.host_view(shard)

    def writable(self, shard: LocalShard) -> Carrier | None:
        return self._inner.writable(shard)

    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return self._inner.fingerprint(shards)

    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        return self._inner.empty(description, like)

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        if id(shard) not in self._keys:
            self._keys[id(shard)] = self._inner.storage_key(shard)
            self._kept.append(shard)
        return self._keys[id(shard)]

    def signature(self, value: Any) -> Hashable | None:
        return self._inner.signature(value)


def tensor_test(tensors: Tensors) -> Callable[[Any], bool]:
    """Whether a value is a tensor, also of a kind that cannot be stored: describing it by name then says so."""
    known: dict[type, bool] = {}

    def is_tensor(value: Any) -> bool:
        found = known.get(type(value))
        if found is None:  # the type alone decides
            try:
                found = tensors.describe(value) is not None
            except UnsupportedStateError:
                found = True
            known[type(value)] = found
        return found

    return is_tensor


def form_of(tensors: Tensors) -> Callable[[Any], Form | None]:
    """How a tensor in an object's state lies, for `flatten`."""

    def form(value: Any) -> Form | None:
        if isinstance(value, np.ndarray):
            return "array"
        try:
            layout = getattr(tensors.describe(value), "layout", None)
        except UnsupportedStateError:  # describing it by name will say so
            return None
        if isinstance(layout, MeshLayout):
            return "sharded" if any(isinstance(each, Shard) for each in layout.placements) else "replicated"
        return "sharded" if isinstance(layout, Boxes) else None

    return form


def tensor_maker(tensors: Tensors, stager: Stager) -> MakeTensor:
    """Makes the tensors of payloads: numpy arrays of what were some, others as the platform has them."""

    def make(node: RawNode) -> Any:
        like = np.empty(0) if node.form == "array" else None
        return from_host(tensors, stager, node.dtype, node.shape, node.v, like)

    return make


def parts_of_kind(tensors: Tensors) -> Callable[[type], PartsOf | None]:
    """What takes tensors of a class apart; None where they are never made of others."""
    return functools.cache(lambda kind: tensors.parts if tensors.may_have_parts(kind) else None)


def state_of(manifest: Manifest) -> Node:
    """The saved state, of which the manifest has every tensor.

    Raises:
        ManifestError: it is damaged, or names a tensor that the manifest does not have.
    """
    tree = decode_tree(manifest.state)
    if not isinstance(tree, KeyedNode):
        raise ManifestError(f"{manifest.what} is not a valid manifest: its state is not a dict")
    absent = [name for name in tensor_names(tree) if name not in manifest.tensors]
    if absent:
        raise ManifestError(f"{manifest.what} is not a valid manifest: it does not say where {absent[0]!r} is stored")
    return tree


def operation(platform: Platform, timeout: object, call: str) -> Operation:
    """The next save or load of the platform's ranks. `call` says which, as far as that is known: what and where.

    Args:
        timeout: in seconds. What `check_timeout` refuses counts as the default here, so that the rank meets the others;
            the operation's first step must refuse it on all ranks.
    """
    checked, _ = attempt(lambda: check_timeout(timeout))
    seconds = min(checked or DEFAULT_TIMEOUT, MAX_TIMEOUT)
    number = in_step(platform.ranks, next(platform.operations), call, seconds)
    platform.operations = itertools.count(number + 1)
    return Operation(platform.ranks, number, seconds)


def few(words: Sequence[str]) -> str:
    """The first five, and how many more there are."""
    return ", ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")


def brief(groups: Sequence[Sequence[int]]) -> str:
    """Sets of ranks in brief: of the first four, the first four."""
    shown = [",".join(map(str, ranks[:4])) + "..." * (len(ranks) > 4) for ranks in groups[:4]]
    return " / ".join(shown) + " / ..." * (len(groups) > 4)


def attempt(action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Runs what only this rank does. Its error is not raised here: `Operation.agree` raises it on every rank."""
    try:
        return action(), None
    except BaseException as error:
        return None, error


def settle(operation: Operation, resolve: Callable[[], T]) -> T:
    """Resolves the arguments of a call on every rank; arguments that one rank cannot resolve fail on all.

    Raises:
        ValueError, CheckpointError: the first failing rank's error.
    """
    call, error = attempt(resolve)
    operation.agree("reading the arguments", error=error)
    assert call is not None
    return call
