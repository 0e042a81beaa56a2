"""Nodes back to values: a saved state without a target, payloads, blobs."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.errors import DigestError, ManifestError
from hyper_ckpt.state.check import decode_tree
from hyper_ckpt.state.classes import find_member, make_namespace, namedtuple_class
from hyper_ckpt.state.codec_table import CodecTable
from hyper_ckpt.state.codecs import BUILTIN
from hyper_ckpt.state.flatten import FACTORIES
from hyper_ckpt.state.names import parse_key, shown
from hyper_ckpt.state.scalars import complex_of, float_of, int_of, range_of, str_of
from hyper_ckpt.state.tree import (
    BlobNode,
    ByteArrayNode,
    BytesNode,
    CodecNode,
    ComplexNode,
    CounterNode,
    DefaultDictNode,
    DequeNode,
    DictNode,
    EnumNode,
    FloatNode,
    FrozenSetNode,
    IntNode,
    KeyedNode,
    ListNode,
    NamedTupleNode,
    NamespaceNode,
    Node,
    OrderedDictNode,
    PartsNode,
    PerRankNode,
    PickleNode,
    RangeNode,
    RawNode,
    SequenceNode,
    SetNode,
    SliceNode,
    StatefulNode,
    StrNode,
    TensorNode,
    TupleNode,
    children,
    count_of,
    is_plain,
    kind_of,
    resolved,
)
from hyper_ckpt.values import PerRank

MAX_COLLISIONS = 100
"""Items of one dict or set that may have the same hash. Of what is not made up two or three have."""

MakeTensor = Callable[[RawNode], Any]
"""A tensor of a payload, as the platform that loads has it."""


@dataclass(frozen=True)
class Sources:
    """Where what stands beside the tree comes from. All are called with names.

    `payload` gives None where this rank saved none. `blob` gives the bytes that a blob's digest speaks of.
    """

    payload: Callable[[str], bytes | None]
    blob: Callable[[str, BlobNode], bytes]
    make_tensor: MakeTensor
    tensor: Callable[[str], Any] | None = None


def rebuild(
    tree: Node,
    *,
    tensor: Callable[[str], Any],
    payload: Callable[[str], bytes | None],
    blob: Callable[[str, BlobNode], bytes],
    make_tensor: MakeTensor,
    codecs: Sequence[Codec] = BUILTIN,
    allow_pickle: bool = False,
) -> dict[Any, Any]:
    """The state that a rank's tree stands for.

    `PerRank` values come as `PerRank` (of None where `payload` gives None), objects with a state_dict as
    what it gave.

    Raises:
        CorruptCheckpointError: the tree, a payload or a blob is damaged or hostile.
        UnsupportedTypeError: a codec or Enum class is not there, or pickles are not allowed.
    """
    if not isinstance(tree, KeyedNode):
        raise ManifestError("the saved state is not a dict")
    sources = Sources(payload, blob, make_tensor, tensor)
    builder = Builder(sources, CodecTable(codecs, allow_pickle=allow_pickle))
    try:
        state: dict[Any, Any] = builder.value(tree, None)
    except RecursionError as error:
        raise ManifestError("the saved state is nested too deeply for the stack that is left") from error
    return state


class Builder:
    """Makes values of nodes."""

    def __init__(self, sources: Sources, codecs: CodecTable) -> None:
        self._sources = sources
        self.codecs = codecs

    def value(self, node: Node, name: str | None) -> Any:
        """The value of a node and all that is below it."""
        if not isinstance(node, msgspec.Struct):
            return node
        make = _MAKERS.get(type(node))
        if make is None:
            raise ManifestError(f"{shown(name)} is not in the form of one rank's state")
        return make(self, node, name)

    def inlined(self, node: Node, name: str | None) -> Node:
        """The node that a blob stands for; any other node itself."""
        if not isinstance(node, BlobNode):
            return resolved(node)
        data = self._sources.blob("" if name is None else name, node)
        if len(data) != node.size or xxhash.xxh3_128_hexdigest(data) != node.digest:
            raise DigestError(f"the stored bytes of {shown(name)} are not those that were saved")
        inner = decode_tree(data, payload=True)
        if not is_plain(inner) or (kind_of(inner), count_of(inner)) != (node.kind, node.count):
            raise ManifestError(f"{shown(name)} is stored as something else than the state's structure says")
        return inner

    def payload(self, name: str | None) -> tuple[Node] | None:
        """The tree of a `PerRank`'s value, in a tuple; None where this rank saved none."""
        data = self._sources.payload("" if name is None else name)
        return None if data is None else (decode_tree(data, payload=True),)

    def tensor(self, name: str | None) -> Any:
        """A tensor of the state."""
        if self._sources.tensor is None:
            raise ManifestError(f"{shown(name)}: a tensor where none can be")
        return self._sources.tensor("" if name is None else name)

    def raw(self, node: RawNode, name: str | None) -> Any:
        """A tensor inside a payload."""
        try:
            return self._sources.make_tensor(node)
        except ValueError as error:
            raise ManifestError(f"{shown(name)}: a tensor of a payload is damaged: {error}") from error

    def items(self, node: KeyedNode | SequenceNode, name: str | None) -> list[Any]:
        """The values in a container."""
        return [
            self.value(child, child_name) if isinstance(child, msgspec.Struct) else child
            for child_name, child in children(node, name)
        ]


def keyed_value(node: KeyedNode, items: Iterable[Any]) -> Any:
    """The kind of dict, or namespace, that a node stands for, with these values."""
    made = dict_value(node, items)
    if isinstance(node, OrderedDictNode):
        return OrderedDict(made)
    if isinstance(node, CounterNode):
        return Counter(made)
    if isinstance(node, DefaultDictNode):
        return defaultdict(_FACTORY[node.factory], made)
    return make_namespace(node.of, made) if isinstance(node, NamespaceNode) else made


def dict_value(node: KeyedNode, items: Iterable[Any]) -> dict[Any, Any]:
    """These values under the keys of a node."""
    keys = [*map(parse_key, node.k)]
    _refuse_collisions(keys)
    made = dict(zip(keys, items, strict=True))
    if len(made) < len(node.k):
        raise ManifestError("a dict of the saved state has two keys that are equal, like 1 and true")
    return made


def sequence_value(node: SequenceNode, items: Sequence[Any]) -> Any:
    """The list, tuple, namedtuple or deque that a node stands for, with these items."""
    if isinstance(node, NamedTupleNode):
        # Not by calling the class: it may have a __new__ of its own.
        return tuple.__new__(namedtuple_class(node.module, node.name, node.fields), items)
    if isinstance(node, DequeNode):
        return deque(items, node.maxlen)
    return tuple(items) if not isinstance(node, ListNode) else list(items)


def _per_rank(builder: Builder, node: PerRankNode, name: str | None) -> PerRank:
    payload = builder.payload(name)
    return PerRank(None if payload is None else builder.value(payload[0], name))


def _hashable(builder: Builder, node: SetNode | FrozenSetNode, name: str | None) -> list[Any]:
    items = [builder.value(item, name) for item in node.v]
    try:
        _refuse_collisions(items)
    except TypeError as error:
        raise ManifestError(f"{shown(name)} is a set of what cannot be in one: {error}") from error
    return items


def _refuse_collisions(values: Sequence[Any]) -> None:
    """Refuses values of which many have one hash: dicts and sets of n of them take n * n steps. Strings have none that
    could be foreseen, but numbers have."""
    counts = Counter(map(hash, values))
    if len(counts) < len(values) - MAX_COLLISIONS and max(counts.values()) > MAX_COLLISIONS:
        raise ManifestError(f"a dict or set of the saved state has more than {MAX_COLLISIONS} items of one hash")


def _slice(builder: Builder, node: SliceNode, name: str | None) -> slice:
    start, stop, step = (builder.value(each, name) for each in node.v)
    return slice(start, stop, step)


def _keyed(builder: Builder, node: KeyedNode, name: str | None) -> Any:
    return keyed_value(node, builder.items(node, name))


def _sequence(builder: Builder, node: SequenceNode, name: str | None) -> Any:
    return sequence_value(node, builder.items(node, name))


_FACTORY: dict[str | None, Callable[[], Any] | None] = {None: None, **{name: cls for cls, name in FACTORIES.items()}}

_MAKERS: dict[type, Callable[[Builder, Any, str | None], Any]] = {
    **dict.fromkeys((DictNode, OrderedDictNode, CounterNode, DefaultDictNode, NamespaceNode, PartsNode), _keyed),
    **dict.fromkeys((ListNode, TupleNode, NamedTupleNode, DequeNode), _sequence),
    SetNode: lambda builder, node, name: set(_hashable(builder, node, name)),
    FrozenSetNode: lambda builder, node, name: frozenset(_hashable(builder, node, name)),
    TensorNode: lambda builder, node, name: builder.tensor(name),
    RawNode: lambda builder, node, name: builder.raw(node, name),
    PerRankNode: _per_rank,
    StatefulNode: lambda builder, node, name: builder.value(node.v, name),
    BlobNode: lambda builder, node, name: builder.value(builder.inlined(node, name), name),
    IntNode: lambda builder, node, name: int_of(node),
    FloatNode: lambda builder, node, name: float_of(node),
    ComplexNode: lambda builder, node, name: complex_of(node),
    StrNode: lambda builder, node, name: str_of(node),
    BytesNode: lambda builder, node, name: node.v,
    ByteArrayNode: lambda builder, node, name: bytearray(node.v),
    RangeNode: lambda builder, node, name: range_of(node),
    SliceNode: _slice,
    EnumNode: lambda builder, node, name: find_member(node.module, node.name, node.member),
    CodecNode: lambda builder, node, name: builder.codecs.decode(node, name),
    PickleNode: lambda builder, node, name: builder.codecs.unpickle(node, name),
}
