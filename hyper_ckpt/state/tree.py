"""The structure of a state as data: what containers it has, what stands where, every plain value.

None, bools, 64-bit ints, finite floats and ordinary strings are themselves; everything else is an
object whose "!" says what it is. Tensors and payloads are only marked: their name is their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, Union

import msgspec
from msgspec import Meta, Struct

from hyper_ckpt.contracts.objects import Form
from hyper_ckpt.errors import ManifestError
from hyper_ckpt.state.names import join_all

MAX_DEPTH = 128
"""Containers inside each other. Bounded so that no checkpoint can exhaust a reader's stack."""


class Tagged(Struct, frozen=True, tag_field="!", forbid_unknown_fields=True):
    """Base of all nodes that are objects in JSON."""


class TensorNode(Tagged, frozen=True, omit_defaults=True, tag="tensor"):
    """A tensor, stored under this place's name; or, where ranks hold different ones, a variant of it: that of `rank`
    and others, stored under `variant_name(name, rank)`. `form` is only noted in the states of objects: see `Form`."""

    form: Form | None = None
    rank: Annotated[int, Meta(ge=0)] | None = None


class PerRankNode(Tagged, frozen=True, tag="per_rank"):
    """A value of each rank; its payload is stored under this place's name."""


class RawNode(Tagged, frozen=True, omit_defaults=True, tag="raw"):
    """A tensor inside a payload: dtype name, shape, little-endian row-major bytes. `form`: it was a numpy array."""

    dtype: str
    shape: tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...]
    v: bytes
    form: Literal["array"] | None = None


class BlobNode(Tagged, frozen=True, tag="blob"):
    """A large plain subtree, stored as the bytes of its own tree.

    `kind` and `count` repeat the tag and length of a container (None for anything else), so that states
    can be compared without the bytes. `rank` is the lowest that holds them, None before ranks are merged.
    """

    size: Annotated[int, Meta(ge=0)]
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    kind: str | None = None
    count: Annotated[int, Meta(ge=0)] | None = None
    rank: Annotated[int, Meta(ge=0)] | None = None


class StatefulNode(Tagged, frozen=True, tag="stateful"):
    """The state_dict() of an object. It adds no part to names."""

    v: Node


class RanksNode(Tagged, frozen=True, tag="ranks"):
    """Ranks hold different values here: (ranks, node) for each of them."""

    v: Annotated[tuple[tuple[tuple[int, ...], Node], ...], Meta(min_length=1)]


class KeyedNode(Tagged, frozen=True):
    """Base of the kinds of dict: escaped keys and, in the same order, what they hold."""

    k: tuple[str, ...]
    v: tuple[Node, ...]


class DictNode(KeyedNode, frozen=True, tag="dict"):
    """A dict."""


class OrderedDictNode(KeyedNode, frozen=True, tag="odict"):
    """A collections.OrderedDict."""


class CounterNode(KeyedNode, frozen=True, tag="counter"):
    """A collections.Counter."""


class NamespaceNode(KeyedNode, frozen=True, tag="namespace"):
    """An argparse.Namespace or types.SimpleNamespace: its attributes."""

    of: Literal["argparse", "types"]


class PartsNode(KeyedNode, frozen=True, tag="parts"):
    """A tensor that is made of others: these by name, the name of its class, and what else it says of itself. The last
    two are only compared with the target's."""

    kind: str
    context: Node


Factory = Literal["list", "dict", "int", "float", "set", "str", "tuple", "bool"]


class DefaultDictNode(KeyedNode, frozen=True, tag="defaultdict"):
    """A collections.defaultdict; `factory` is a builtin."""

    factory: Factory | None = None


class SequenceNode(Tagged, frozen=True):
    """Base of the containers whose items have a place each."""

    v: tuple[Node, ...]


class ListNode(SequenceNode, frozen=True, tag="list"):
    """A list."""


class TupleNode(SequenceNode, frozen=True, tag="tuple"):
    """A tuple."""


class DequeNode(SequenceNode, frozen=True, tag="deque"):
    """A collections.deque."""

    maxlen: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class NamedTupleNode(SequenceNode, frozen=True, tag="namedtuple"):
    """An instance of a namedtuple class."""

    module: str
    name: str
    fields: tuple[str, ...]


class SetNode(Tagged, frozen=True, tag="set"):
    """A set, items sorted by their encoding."""

    v: tuple[Node, ...]


class FrozenSetNode(Tagged, frozen=True, tag="frozenset"):
    """A frozenset, items sorted by their encoding."""

    v: tuple[Node, ...]


class RangeNode(Tagged, frozen=True, tag="range"):
    """range(start, stop, step)."""

    v: tuple[Node, Node, Node]


class SliceNode(Tagged, frozen=True, tag="slice"):
    """slice(start, stop, step)."""

    v: tuple[Node, Node, Node]


class IntNode(Tagged, frozen=True, tag="int"):
    """An int beyond 64 bits, in hexadecimal: decimal conversion is slow and limited."""

    v: Annotated[str, Meta(pattern="^-?[0-9a-f]+$")]


class FloatNode(Tagged, frozen=True, tag="float"):
    """A float that JSON cannot say, as its 64 bits."""

    v: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class ComplexNode(Tagged, frozen=True, tag="complex"):
    """Real and imaginary part."""

    v: tuple[Node, Node]


class BytesNode(Tagged, frozen=True, tag="bytes"):
    """Bytes."""

    v: bytes


class ByteArrayNode(Tagged, frozen=True, tag="bytearray"):
    """A bytearray."""

    v: bytes


class StrNode(Tagged, frozen=True, tag="str"):
    """A string with lone surrogates, which UTF-8 refuses: its bytes all the same, in hexadecimal."""

    v: Annotated[str, Meta(pattern="^([0-9a-f]{2})+$")]


class EnumNode(Tagged, frozen=True, tag="enum"):
    """A member of an Enum class."""

    module: str
    name: str
    member: str


class CodecNode(Tagged, frozen=True, tag="codec"):
    """What a codec made of a value."""

    name: str
    v: bytes


class PickleNode(Tagged, frozen=True, tag="pickle"):
    """A pickled value; only with allow_pickle on both sides."""

    v: bytes


Node = Union[  # noqa: UP007  # a line per kind
    None, bool, Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)], float, str,
    TensorNode, PerRankNode, RawNode, BlobNode, StatefulNode, RanksNode,
    DictNode, OrderedDictNode, CounterNode, DefaultDictNode, NamespaceNode, PartsNode,
    ListNode, TupleNode, DequeNode, NamedTupleNode,
    SetNode, FrozenSetNode, RangeNode, SliceNode, IntNode, FloatNode, ComplexNode, BytesNode, ByteArrayNode, StrNode,
    EnumNode, CodecNode, PickleNode,
]  # fmt: skip
"""Any node. Can stand as a field of other msgspec structs; `check_tree` is then still to be called."""


def encode_tree(tree: Node) -> bytes:
    """The tree as JSON."""
    return msgspec.json.encode(tree)


_BLOB = b'"!":"blob"'


def has_blobs(encoded: bytes) -> bool:
    """Whether there is a blob in what `encode_tree` gave. To write a tree and look is faster than to walk it."""
    return _BLOB in encoded  # in a string, its quotes would be escaped


def kind_of(node: Node) -> str | None:
    """The tag of a container, None for anything else. A blob answers for what it stands for."""
    if isinstance(node, BlobNode):
        return node.kind
    return str(node.__struct_config__.tag) if isinstance(node, KeyedNode | SequenceNode) else None


def count_of(node: Node) -> int | None:
    """Number of items of a container, None for anything else."""
    if isinstance(node, BlobNode):
        return node.count
    return len(node.v) if isinstance(node, KeyedNode | SequenceNode) else None


def children(node: Node | Tagged, name: str | None) -> Iterator[tuple[str, Node]]:
    """What stands in a container, with names."""
    if not isinstance(node, KeyedNode | SequenceNode):
        return iter(())
    return zip(child_names(node, name), node.v, strict=True)


def child_names(node: KeyedNode | SequenceNode, name: str | None) -> Sequence[str]:
    """The names of what stands in a container."""
    if isinstance(node, KeyedNode):
        parts = node.k
    elif isinstance(node, NamedTupleNode):
        parts = node.fields
    else:
        parts = tuple(map(str, range(len(node.v))))
    return join_all(name, parts)


def has_only_leaves(node: KeyedNode | SequenceNode) -> bool:
    """Whether a container holds neither containers nor what looks like one. Told by the types of what it holds: these
    are few where items are very many."""
    inner = (KeyedNode, SequenceNode, StatefulNode, RanksNode)
    return not any(issubclass(kind, inner) for kind in set(map(type, node.v)))


def with_items(node: Tagged, items: Iterable[Node], keys: tuple[str, ...] | None = None) -> Node:
    """A container of the same kind that holds other items, under other keys if given."""
    if keys is None:
        return msgspec.structs.replace(node, v=tuple(items))  # type: ignore[return-value]
    return msgspec.structs.replace(node, v=tuple(items), k=keys)  # type: ignore[return-value]


def is_plain(node: Node) -> bool:
    """Whether the subtree is known without any tensor or payload, and no object has to be told of it."""
    if isinstance(node, PartsNode):
        return False
    if isinstance(node, KeyedNode | SequenceNode):
        return all(map(is_plain, node.v))
    return not isinstance(node, TensorNode | PerRankNode | RawNode | StatefulNode)


def unwrap(node: Node) -> Node:
    """Looks through objects with a state_dict: what they hold may be loaded into a plain dict, and the reverse."""
    while isinstance(node, StatefulNode):
        node = node.v
    return node


def resolved(node: Node) -> Node:
    """`node`, which must not be one that `select` resolves.

    Raises:
        ManifestError: it is.
    """
    if isinstance(node, RanksNode):
        raise ManifestError("the tree holds values of several ranks: select a rank's first")
    return node
