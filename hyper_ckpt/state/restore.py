"""A saved state put back into the state that a load was given.

First everything is decoded and every change is noted; only then are the changes made, so that damaged
bytes leave the target as it was.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_ckpt.contracts.codec import Codec
from hyper_ckpt.errors import ManifestError, TargetError
from hyper_ckpt.state.ask import in_order
from hyper_ckpt.state.build import Builder, MakeTensor, Sources, dict_value, keyed_value, sequence_value
from hyper_ckpt.state.classes import has_state, is_bare_sequence, is_stateful, namespace_of
from hyper_ckpt.state.codec_table import CodecTable
from hyper_ckpt.state.codecs import BUILTIN
from hyper_ckpt.state.digests import canonical
from hyper_ckpt.state.flat_state import Composed, FlatState
from hyper_ckpt.state.names import escape_keys, join, shown
from hyper_ckpt.state.scalars import SCALARS
from hyper_ckpt.state.tree import (
    BlobNode,
    ByteArrayNode,
    CodecNode,
    CounterNode,
    DefaultDictNode,
    DequeNode,
    DictNode,
    KeyedNode,
    ListNode,
    NamedTupleNode,
    NamespaceNode,
    Node,
    OrderedDictNode,
    PartsNode,
    PerRankNode,
    SequenceNode,
    SetNode,
    StatefulNode,
    TensorNode,
    TupleNode,
    child_names,
    children,
    encode_tree,
    unwrap,
)
from hyper_ckpt.values import PerRank


def prepare_restore(
    flat: FlatState,
    saved: Node,
    *,
    payload: Callable[[str], bytes | None],
    blob: Callable[[str, BlobNode], bytes],
    make_tensor: MakeTensor,
    tensors: Mapping[str, Any],
    codecs: Sequence[Codec] = BUILTIN,
    allow_pickle: bool = False,
    check: Callable[[Any, Any], None] = lambda owner, state: None,
    load: Callable[[Any, Any], None] = lambda owner, state: owner.load_state_dict(state),
) -> Restore:
    """Decodes everything that is not a tensor's contents, and returns what sets it in the target: to be called when
    these have been read.

    Plain values replace the target's, in its own dicts, lists, deques, sets, bytearrays and random
    generators; tuples are rebuilt where they stand. What was not saved, or doesn't fit (see `compare`), stays
    as it is. `PerRank.value` is set, unless `payload` gives None. Where one container stands in two places that were
    saved differently, the second gets one of its own. Last, each object with a state_dict gets it by load_state_dict,
    in the order of names, inner objects before outer ones; what one of these raises comes out as it is, and the rest
    is then not done. What `flat.whole` names gets the saved state as it was saved.

    Args:
        tensors: by name, tensors that take the place of the target's own.
        check, load: see `Objects`.

    Raises:
        CorruptCheckpointError: the tree, a payload or a blob is damaged or hostile.
        UnsupportedTypeError: a codec or Enum class is not there, or pickles are not allowed.
        TargetError: one generator or the like stands in two places that get different values, or `check` raised it.
    """
    if not isinstance(saved, KeyedNode):
        raise ManifestError("the saved state is not a dict")
    all_tensors = {**flat.tensors, **tensors} if tensors else flat.tensors
    sources = Sources(payload, blob, make_tensor, all_tensors.__getitem__)
    changes = _Changes(flat, Builder(sources, CodecTable(codecs, allow_pickle=allow_pickle)), tensors)
    try:
        changes.plan(flat.root, saved, None)
    except RecursionError as error:
        raise ManifestError("the saved state is nested too deeply for the stack that is left") from error
    loads = sorted(changes.loads, key=lambda each: [*in_order(each.name), _LAST])
    for each in loads:
        check(each.object, each.state)
    return Restore(changes.noted, loads, load)


_LAST = chr(sys.maxunicode)  # what is inside an object comes before it


@dataclass(frozen=True, eq=False)
class Loaded:
    """An object, and what it is handed: `whole`, as it was saved, or with what it has besides."""

    name: str | None
    object: Any
    state: Any
    whole: bool


@dataclass(frozen=True, eq=False)
class Restore:
    """What is to be done with a target: changes in it, then objects to load, in the order to do it."""

    changes: Sequence[Callable[[], object]]
    loads: Sequence[Loaded]
    load: Callable[[Any, Any], None]

    def run(self) -> None:
        """Does all of it."""
        for change in self.changes:
            change()
        for each in self.loads:
            self.load(each.object, each.state)


class _Changes:
    """Walks a target beside a saved tree and notes what to change, and last, which objects to load."""

    def __init__(self, flat: FlatState, builder: Builder, tensors: Mapping[str, Any]) -> None:
        self.noted: list[Callable[[], object]] = []
        self._flat = flat
        self._builder = builder
        self._tensors = tensors
        self.loads: list[Loaded] = []
        self._seen: dict[int, tuple[Node, str | None]] = {}

    def plan(self, value: Any, node: Node, name: str | None) -> Any:
        """What shall stand where `value` stands: mostly itself, with changes noted."""
        substate = self._flat.substates.get(name) if name is not None else None
        if substate is not None and substate.object is value:
            return self._stateful(value, substate.state, node, name)
        if name in self._flat.whole:
            return self._whole(value, node, name)
        composed = self._flat.composed.get(name) if name is not None else None
        if composed is not None and composed.value is value:
            return self._composed(composed, unwrap(node), name)
        if name in self._flat.tensors and self._flat.tensors[name] is value:
            is_saved = isinstance(unwrap(node), TensorNode)
            return self._tensors.get(name, value) if is_saved else value
        node = self._builder.inlined(unwrap(node), name)
        if isinstance(value, PerRank):
            self._per_rank(value, node, name)
            return value
        if isinstance(node, KeyedNode | SequenceNode):
            return self._container(value, node, name) if _fits(value, node) else value
        if isinstance(node, TensorNode | PerRankNode) or _is_container(value):
            return value
        return self._plain(value, node, name)

    def _composed(self, composed: Composed, node: Node, name: str | None) -> Any:
        """The inner tensors are filled where they are; if some were replaced, a tensor of the target's own class."""
        parts = composed.parts
        saved = dict(zip(node.k, node.v, strict=True)) if isinstance(node, PartsNode) else {}
        inner = {}
        for (key, each), part in zip(parts.inner.items(), escape_keys(parts.inner, name), strict=True):
            inner[key] = self.plan(each, saved[part], join(name, part)) if part in saved else each
        unchanged = all(inner[key] is each for key, each in parts.inner.items())
        return composed.value if unchanged else parts.rebuild(inner)

    def _stateful(self, value: Any, state: Any, node: Node, name: str | None) -> Any:
        whole = name in self._flat.whole
        node = self._builder.inlined(unwrap(node), name)
        new = self._whole(state, node, name) if whole else self.plan(state, node, name)
        if not whole and new is state and _is_container(state) and not _fits(state, node):
            return value
        self.loads.append(Loaded(name, value, new, whole))
        return value

    def _per_rank(self, value: PerRank, node: Node, name: str | None) -> None:
        payload = self._builder.payload(name) if isinstance(node, PerRankNode) else None
        if payload is not None:
            new = self._whole(value.value, payload[0], name)
            self.noted.append(lambda: setattr(value, "value", new))

    def _container(self, value: Any, node: Node, name: str | None) -> Any:
        if self._is_taken(value, node, name):
            value = copy.copy(value)
        if self._is_filled(value, node, name):
            return value
        if isinstance(node, KeyedNode):
            saved = dict(zip(node.k, node.v, strict=True))
            new = {}
            held = _held(value)
            for (key, item), part in zip(held.items(), escape_keys(held, name), strict=True):
                if part in saved:
                    new[key] = self.plan(item, saved[part], join(name, part))
            self._note_items(held, new, name)
            return value
        pairs = zip(value, children(node, name), strict=True)
        items = [self.plan(item, child, child_name) for item, (child_name, child) in pairs]
        if isinstance(value, tuple):
            unchanged = all(new is old for new, old in zip(items, value, strict=True))
            return value if unchanged else tuple.__new__(type(value), items)
        self.noted.append(lambda: _set_sequence(value, items))
        return value

    def _note_items(self, value: Mapping[Any, Any], new: dict[Any, Any], name: str | None) -> None:
        if isinstance(value, MutableMapping):
            self.noted.append(lambda: _set_items(value, new))
            return
        for key, item in new.items():
            if not (value[key] is item or _is_same_scalar(value[key], item)):
                raise TargetError(
                    f"{shown(name)} is a {type(value).__qualname__}, which cannot be changed, and {key!r} in it is not "
                    "filled in place: give the target a dict there"
                )

    def _is_filled(self, value: Any, node: Node, name: str | None) -> bool:
        """Whether a container holds nothing but tensors, which have been filled where they stand."""
        if self._tensors or not isinstance(node, KeyedNode | SequenceNode) or set(map(type, node.v)) != {TensorNode}:
            return False
        whole = self._flat.whole
        if whole and not whole.isdisjoint(child_names(node, name)):
            return False
        # An object may have given a tensor as its state.
        return not any(map(has_state, set(map(type, _items_of(value)))))

    def _plain(self, value: Any, node: Node, name: str | None) -> Any:
        new = self._builder.value(node, name)
        change = self._in_place(value, new, node)
        if change is None:
            return new
        if self._is_taken(value, node, name):
            if isinstance(node, CodecNode):  # the program's own generator or the like, which cannot be two
                raise TargetError(
                    f"{shown(self._seen[id(value)][1])} and {shown(name)} are one {type(value).__qualname__} in the "
                    "target, but two different ones in the checkpoint: give the target one of its own in each place"
                )
            return new
        self.noted.append(change)
        return value

    def _in_place(self, value: Any, new: Any, node: Node) -> Callable[[], object] | None:
        """How the target's own object takes on a saved value; None if it is replaced."""
        if type(value) is not type(new):
            return None
        if isinstance(node, SetNode):
            return lambda: (value.clear(), value.update(new))
        if isinstance(node, ByteArrayNode):
            return lambda: value.__setitem__(slice(None), new)
        assign = self._builder.codecs.assign_of(node) if isinstance(node, CodecNode) else None
        return None if assign is None else lambda: assign(value, new)

    def _whole(self, old: Any, node: Node, name: str | None) -> Any:
        """The saved value. Of the target's only what can't be made anew is kept: objects, `PerRank`s, generators."""
        substate = self._flat.substates.get(name) if name is not None else None
        if substate is not None and substate.object is old:
            return self._stateful(old, substate.state, node, name)
        composed = self._flat.composed.get(name) if name is not None else None
        if composed is not None and composed.value is old:
            return self._composed(composed, node, name)
        if isinstance(node, StatefulNode):
            if not is_stateful(old):
                return self._whole(old, node.v, name)
            self.loads.append(Loaded(name, old, self._whole(None, node.v, name), True))
            return old
        node = self._builder.inlined(node, name)
        if isinstance(node, KeyedNode):
            keyed = dict_value(node, node.v)
            olds = _held(old) if _is_keyed(old) else {}
            named = zip(keyed.items(), children(node, name), strict=True)
            return keyed_value(node, [self._whole(olds.get(key), item, at) for (key, item), (at, _) in named])
        if isinstance(node, SequenceNode):
            olds_in_order = old if isinstance(old, list | tuple | deque) else ()
            padded = [*olds_in_order, *[None] * len(node.v)]
            named_items = zip(children(node, name), padded, strict=False)
            return sequence_value(node, [self._whole(each, item, at) for (at, item), each in named_items])
        if isinstance(node, PerRankNode) and isinstance(old, PerRank):
            self._per_rank(old, node, name)
            return old
        return self._plain(old, node, name) if isinstance(node, CodecNode) else self._builder.value(node, name)

    def _is_taken(self, value: Any, node: Node, name: str | None) -> bool:
        """Whether a mutable object stood in another place already, for which another value was saved: one of the two
        would be lost."""
        first, _ = self._seen.setdefault(id(value), (node, name))
        if first is node or isinstance(value, tuple):
            return False
        return encode_tree(canonical(first)) != encode_tree(canonical(node))


_KINDS: dict[type, type[Node]] = {
    dict: DictNode, OrderedDict: OrderedDictNode, Counter: CounterNode, defaultdict: DefaultDictNode,
    list: ListNode, tuple: TupleNode, deque: DequeNode,
}  # fmt: skip


def _kind(value: Any) -> type[Any]:
    """The kind of node that a container of the target has; `object` for anything else."""
    found = _KINDS.get(type(value))
    if found is None and namespace_of(type(value)) is not None:
        return NamespaceNode
    if found is None and isinstance(value, Mapping):
        return DictNode
    if found is None and is_bare_sequence(value):
        return TupleNode if isinstance(value, tuple) else ListNode
    return found or object


def _is_keyed(value: Any) -> bool:
    return issubclass(_kind(value), KeyedNode)


def _is_container(value: Any) -> bool:
    return _kind(value) is not object or isinstance(value, tuple)


def _held(value: Any) -> Mapping[Any, Any]:
    """The mapping, or the dict of a namespace's attributes."""
    held: Mapping[Any, Any] = vars(value) if _kind(value) is NamespaceNode else value
    return held


def _items_of(value: Any) -> Collection[Any]:
    """What a container holds."""
    items: Collection[Any] = _held(value).values() if _is_keyed(value) else value
    return items


def _fits(value: Any, node: Node) -> bool:
    """Whether a container of the target is of the saved kind and length; mappings of all kinds fit each other."""
    if isinstance(node, NamedTupleNode):
        return isinstance(value, tuple) and getattr(type(value), "_fields", None) == node.fields
    if isinstance(node, KeyedNode):
        return _is_keyed(value)
    return _kind(value) is type(node) and isinstance(node, SequenceNode) and len(value) == len(node.v)


def _is_same_scalar(one: Any, other: Any) -> bool:
    node = SCALARS.get(type(one))
    return node is not None and type(one) is type(other) and bool(node(one) == node(other))


def _set_items(target: MutableMapping[Any, Any], new: dict[Any, Any]) -> None:
    # Not update: a Counter's adds.
    for key, value in new.items():
        target[key] = value


def _set_sequence(target: list[Any] | deque[Any], items: list[Any]) -> None:
    for index, value in enumerate(items):
        target[index] = value
