"""A nested state taken apart: its tree, its tensors by name, and what is stored beside them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, get_args

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.contracts.objects import Form
from hyper_ckpt.contracts.platform import TensorParts
from hyper_ckpt.errors import UnsupportedStateError, UnsupportedTypeError
from hyper_ckpt.state.ask import Asker, Substate, state_of
from hyper_ckpt.state.blobs import take_blobs
from hyper_ckpt.state.classes import is_bare_sequence, is_namedtuple, is_stateful, member_name, namespace_of
from hyper_ckpt.state.codec_table import CodecTable
from hyper_ckpt.state.codecs import BUILTIN
from hyper_ckpt.state.flat_state import Composed, FlatState, Given, PartsOf, ToHost
from hyper_ckpt.state.names import escape_keys, join, join_all, shown
from hyper_ckpt.state.scalars import SCALARS
from hyper_ckpt.state.tree import (
    MAX_DEPTH,
    CounterNode,
    DefaultDictNode,
    DequeNode,
    DictNode,
    EnumNode,
    Factory,
    FrozenSetNode,
    KeyedNode,
    ListNode,
    NamedTupleNode,
    NamespaceNode,
    Node,
    OrderedDictNode,
    PartsNode,
    PerRankNode,
    RawNode,
    SetNode,
    SliceNode,
    StatefulNode,
    TensorNode,
    TupleNode,
    encode_tree,
    with_items,
)
from hyper_ckpt.values import PerRank

FACTORIES: dict[type, Factory] = {
    list: "list", dict: "dict", int: "int", float: "float", set: "set", str: "str", tuple: "tuple", bool: "bool",
}  # fmt: skip


_TENSOR = TensorNode()
_TENSORS: dict[Form | None, TensorNode] = {None: _TENSOR} | {form: TensorNode(form) for form in get_args(Form)}


def flatten(
    state: Mapping[Any, Any],
    *,
    is_tensor: Callable[[Any], bool],
    parts_of_kind: Callable[[type], PartsOf | None] = lambda _: None,
    codecs: Sequence[Codec] = BUILTIN,
    allow_pickle: bool = False,
    to_host: ToHost | None = None,
    form_of: Callable[[Any], Form | None] = lambda _: None,
) -> FlatState:
    """Takes a state apart.

    Args:
        is_tensor: whether a value is a tensor; asked of values that are no plain Python values.
        parts_of_kind: for a class of tensors, what takes one apart that is made of others; None: none of them is.
        allow_pickle: pickle what no codec knows.
        to_host: reads a tensor inside a `PerRank`. None for the target of a load: what its `PerRank`s hold
            is then not looked at, and `payloads` stays empty.
        form_of: how a tensor in an object's state lies.

    Raises:
        UnsupportedStateError: a value can't be stored; names it and says what to do.
    """
    if not isinstance(state, Mapping):
        raise UnsupportedTypeError(
            f"the state is a {type(state).__qualname__}; it must be a dict: wrap it, as in {{'model': ...}}"
        )
    table = CodecTable(codecs, allow_pickle=allow_pickle)
    asker = Asker(lambda value: _is_object(value, is_tensor, table), payloads=to_host is not None)
    walk = _StateWalk(_Tests(is_tensor, parts_of_kind, table, asker.given), to_host, form_of)
    try:
        asker.ask(state, None)
        tree = walk.node(state, None) if type(state) in _KEYED else walk.mapping(state, None)
    except RecursionError as error:
        raise UnsupportedStateError("the state is nested too deeply for the stack that is left") from error
    tree, blobs = take_blobs(tree)
    return FlatState(state, tree, walk.tensors, walk.payloads, blobs, walk.substates, walk.composed_tensors)


class _Tests(NamedTuple):
    """What tells kinds of values apart, see `flatten`."""

    is_tensor: Callable[[Any], bool]
    parts_of_kind: Callable[[type], PartsOf | None]
    codecs: CodecTable
    given: Given


class _Walk:
    """Makes nodes of values. What tensors, `PerRank`s and objects become is up to where the values stand."""

    def __init__(self, tests: _Tests) -> None:
        self._tests = tests
        self._is_tensor, self._codecs, self._given = tests.is_tensor, tests.codecs, tests.given
        # Ids of the containers around the current value: finds cycles, and says how deep it is.
        self._around: set[int] = set()

    def node(self, value: Any, name: str | None) -> Node:
        scalar = SCALARS.get(type(value))
        if scalar is not None:
            return scalar(value)
        container = _CONTAINERS.get(type(value))
        if container is None:
            return self._other(value, name)
        with _Inside(self._around, value, name):
            return container(self, value, name)

    def nodes(self, values: Collection[Any], names: Iterable[str]) -> list[Node]:
        """The nodes of what stands in a container. Where there are very many, mostly all are tensors: the type alone
        decides."""
        examples = {type(value): value for value in values}
        if all(k not in SCALARS and k not in _CONTAINERS and self._is_tensor(v) for k, v in examples.items()):
            plain = not any(map(self._tests.parts_of_kind, examples))
            node = self.tensor if plain else self._tensor_or_parts
            return [node(value, name) for value, name in zip(values, names, strict=True)]
        return [self.node(value, name) for value, name in zip(values, names, strict=True)]

    def tensor(self, value: Any, name: str | None) -> Node:
        raise NotImplementedError

    def composed(self, value: Any, parts: TensorParts, name: str | None) -> Node:
        """The node of a tensor that is made of others."""
        raise UnsupportedStateError(
            f"{shown(name)}: a {parts.kind} is made of other tensors, and what stands here is made anew by a load, "
            "which never makes a class that a checkpoint names: store its inner tensors"
        )

    def per_rank(self, value: PerRank, name: str | None) -> Node:
        raise NotImplementedError

    def stateful(self, value: Any, name: str | None) -> Node:
        """The node of an object's state_dict()."""
        return StatefulNode(self.node(self._state_of(value, name), name))

    def _state_of(self, value: Any, name: str | None) -> Any:
        given = self._given.get(name)
        return given.state if given is not None and given.object is value else state_of(value, name)

    def _tensor_or_parts(self, value: Any, name: str | None) -> Node:
        parts_of = self._tests.parts_of_kind(type(value))
        try:
            parts = parts_of(value) if parts_of is not None else None
        except UnsupportedStateError as error:
            raise type(error)(f"{shown(name)}: {error}") from error
        if parts is None:
            return self.tensor(value, name)
        with _Inside(self._around, value, name):
            return self.composed(value, parts, name)

    def _other(self, value: Any, name: str | None) -> Node:
        if self._is_tensor(value):
            return self._tensor_or_parts(value, name)
        if isinstance(value, PerRank):
            return self.per_rank(value, name)
        codec = self._codecs.find(type(value))
        if codec is not None:
            return self._codecs.encode(codec, value, name)
        if isinstance(value, Enum):
            return _of_enum(value, name)
        if is_namedtuple(value):
            make = self.namedtuple
        elif is_stateful(value):
            make = self.stateful
        elif isinstance(value, Mapping):
            make = self.mapping
        elif namespace_of(type(value)) is not None:
            make = self.namespace
        elif is_bare_sequence(value):
            make = self.sequence
        else:
            return self._codecs.pickle(value, name)
        with _Inside(self._around, value, name):
            return make(value, name)

    def namedtuple(self, value: Any, name: str | None) -> Node:
        """The node of a namedtuple, with its class's name."""
        cls = type(value)
        items = tuple(self.node(item, join(name, field)) for field, item in zip(cls._fields, value, strict=True))
        return NamedTupleNode(items, cls.__module__, cls.__qualname__, cls._fields)

    def mapping(self, value: Mapping[Any, Any], name: str | None) -> Node:
        """The node of a mapping of a class that is not known by name: a dict's."""
        return _of_keyed(DictNode)(self, dict(value), name)

    def namespace(self, value: Any, name: str | None) -> Node:
        """The node of a namespace's attributes."""
        of, keyed = namespace_of(type(value)), _of_keyed(DictNode)(self, vars(value), name)
        assert of is not None and isinstance(keyed, KeyedNode)  # noqa: PT018  # no test
        return NamespaceNode(keyed.k, keyed.v, of)

    def sequence(self, value: Any, name: str | None) -> Node:
        """The node of a list or tuple of a class of its own: a list's or tuple's."""
        return _CONTAINERS[tuple if isinstance(value, tuple) else list](self, value, name)

    def sorted_items(self, value: set[Any] | frozenset[Any], name: str | None) -> tuple[Node, ...]:
        """Items of a set in an order that depends only on what they are."""
        walk = _ItemWalk(self._tests._replace(given={}))
        walk._around = self._around
        return tuple(sorted((walk.node(item, name) for item in value), key=encode_tree))


class _StateWalk(_Walk):
    """Values of the state: tensors are noted and stored by themselves."""

    def __init__(self, tests: _Tests, to_host: ToHost | None, form_of: Callable[[Any], Form | None]) -> None:
        super().__init__(tests)
        self._to_host, self._form_of = to_host, form_of
        self._owners = 0  # objects whose states the current value is in
        self.tensors: dict[str, Any] = {}
        self.payloads: dict[str, bytes] = {}
        self.substates: dict[str, Substate] = {}
        self.composed_tensors: dict[str, Composed] = {}

    def tensor(self, value: Any, name: str | None) -> Node:
        self.tensors[_named(name)] = value
        return _TENSORS[self._form_of(value)] if self._owners else _TENSOR

    def composed(self, value: Any, parts: TensorParts, name: str | None) -> Node:
        self.composed_tensors[_named(name)] = Composed(value, parts)
        keys = escape_keys(parts.inner, name)
        inner = [
            self._tensor_or_parts(each, at) for each, at in zip(parts.inner.values(), join_all(name, keys), strict=True)
        ]
        return PartsNode(keys, tuple(inner), parts.kind, self._context(parts, name))

    def _context(self, parts: TensorParts, name: str | None) -> Node:
        codecs = self._codecs.without_pickle()  # a pickle cannot be compared
        try:
            return _ContextWalk(self._tests._replace(codecs=codecs)).node(parts.context, "context")
        except UnsupportedStateError as error:
            raise type(error)(
                f"{shown(name)}: what a {parts.kind} says of itself beside its inner tensors cannot be stored: "
                f"{error}. Or store the inner tensors by themselves"
            ) from error

    def per_rank(self, value: PerRank, name: str | None) -> Node:
        if self._to_host is not None:
            walk = _PayloadWalk(self._tests, self._to_host, self._form_of)
            self.payloads[_named(name)] = encode_tree(walk.node(value.value, name))
        return PerRankNode()

    def stateful(self, value: Any, name: str | None) -> Node:
        state = self._state_of(value, name)
        self.substates[_named(name)] = Substate(value, state)
        self._owners += 1
        node = self.node(state, name)
        self._owners -= 1
        return StatefulNode(node)


class _PayloadWalk(_Walk):
    """Values inside a `PerRank`: tensors are stored by value."""

    def __init__(self, tests: _Tests, to_host: ToHost, form_of: Callable[[Any], Form | None]) -> None:
        super().__init__(tests)
        self._to_host, self._form_of = to_host, form_of

    def tensor(self, value: Any, name: str | None) -> Node:
        return RawNode(*self._to_host(value), "array" if self._form_of(value) == "array" else None)

    def per_rank(self, value: PerRank, name: str | None) -> Node:
        raise UnsupportedStateError(f"{shown(name)}: a PerRank inside a PerRank; drop the inner one")


class _ItemWalk(_Walk):
    """Items of a set, which have no names: plain values only."""

    def tensor(self, value: Any, name: str | None) -> Node:
        raise UnsupportedStateError(f"{shown(name)}: a tensor in a set; use a list or a dict")

    def per_rank(self, value: PerRank, name: str | None) -> Node:
        raise UnsupportedStateError(f"{shown(name)}: a PerRank in a set; use a list or a dict")

    def stateful(self, value: Any, name: str | None) -> Node:
        raise UnsupportedStateError(f"{shown(name)}: an object with a state_dict in a set; use a list or a dict")

    def mapping(self, value: Mapping[Any, Any], name: str | None) -> Node:
        raise UnsupportedStateError(f"{shown(name)}: a mapping in a set; use a list or a dict")


class _ContextWalk(_ItemWalk):
    """What a tensor that is made of others says of itself: plain values only."""

    def tensor(self, value: Any, name: str | None) -> Node:
        raise UnsupportedStateError("it has a tensor")

    def per_rank(self, value: PerRank, name: str | None) -> Node:
        raise UnsupportedStateError("it has a PerRank")

    def stateful(self, value: Any, name: str | None) -> Node:
        raise UnsupportedStateError("it has an object with a state_dict")

    mapping = _Walk.mapping


class _Inside:
    """While a container's items are walked: refuses a container inside itself, and too many of them."""

    def __init__(self, around: set[int], value: Any, name: str | None) -> None:
        if id(value) in around:
            raise UnsupportedStateError(f"{shown(name)} contains itself: a cycle cannot be stored")
        if len(around) >= MAX_DEPTH:
            raise UnsupportedStateError(f"{shown(name):.200} lies deeper than {MAX_DEPTH} containers inside each other")
        self._around, self._id = around, id(value)

    def __enter__(self) -> None:
        self._around.add(self._id)

    def __exit__(self, *error: object) -> None:
        self._around.discard(self._id)


def _named(name: str | None) -> str:
    assert name is not None, "the state itself is a dict"
    return name


def _is_object(value: Any, is_tensor: Callable[[Any], bool], codecs: CodecTable) -> bool:
    """Whether a value that has state_dict and load_state_dict is stored by these."""
    return not is_tensor(value) and not isinstance(value, Enum) and codecs.find(type(value)) is None


def _of_enum(value: Enum, name: str | None) -> EnumNode:
    try:
        return EnumNode(type(value).__module__, type(value).__qualname__, member_name(value))
    except UnsupportedTypeError as error:
        raise UnsupportedTypeError(f"{shown(name)}: {error}") from None


def _items(walk: _Walk, value: Sequence[Any] | deque[Any], name: str | None) -> tuple[Node, ...]:
    return tuple(walk.nodes(value, join_all(name, [*map(str, range(len(value)))])))


def _of_deque(walk: _Walk, value: deque[Any], name: str | None) -> DequeNode:
    return DequeNode(_items(walk, value, name), value.maxlen)


def _of_slice(walk: _Walk, value: slice, name: str | None) -> SliceNode:
    start, stop, step = (walk.node(each, name) for each in (value.start, value.stop, value.step))
    return SliceNode((start, stop, step))


def _of_keyed(cls: type[KeyedNode]) -> Callable[[_Walk, dict[Any, Any], str | None], Node]:
    def node(walk: _Walk, value: dict[Any, Any], name: str | None) -> Node:
        keys = escape_keys(value, name)
        if len(set(keys)) < len(keys):
            # Only nan does that: it differs from itself.
            raise UnsupportedStateError(f"{shown(name)} has a key twice: nan")
        items = walk.nodes(value.values(), join_all(name, keys))
        return with_items(cls((), ()), items, keys)

    return node


def _of_defaultdict(walk: _Walk, value: defaultdict[Any, Any], name: str | None) -> Node:
    factory = value.default_factory
    if factory is not None and (not isinstance(factory, type) or factory not in FACTORIES):
        raise UnsupportedTypeError(
            f"{shown(name)} is a defaultdict with factory {factory!r}; it can be None or one of "
            f"{', '.join(FACTORIES.values())}: set default_factory to one of these, or store a dict"
        )
    keyed = _of_keyed(DictNode)(walk, value, name)
    assert isinstance(keyed, KeyedNode)
    return DefaultDictNode(keyed.k, keyed.v, FACTORIES[factory] if factory is not None else None)


_KEYED: dict[type, type[KeyedNode]] = {
    dict: DictNode, OrderedDict: OrderedDictNode, Counter: CounterNode, defaultdict: DefaultDictNode,
}  # fmt: skip

_CONTAINERS: dict[type, Callable[[_Walk, Any, str | None], Node]] = {
    dict: _of_keyed(DictNode),
    OrderedDict: _of_keyed(OrderedDictNode),
    Counter: _of_keyed(CounterNode),
    defaultdict: _of_defaultdict,
    list: lambda walk, value, name: ListNode(_items(walk, value, name)),
    tuple: lambda walk, value, name: TupleNode(_items(walk, value, name)),
    deque: _of_deque,
    set: lambda walk, value, name: SetNode(walk.sorted_items(value, name)),
    frozenset: lambda walk, value, name: FrozenSetNode(walk.sorted_items(value, name)),
    slice: _of_slice,
}
