"""Objects take the saved state as it was saved: the target's tree with the saved one where that is so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from hyper_ckpt.errors import ContainerMismatchError, TargetError
from hyper_ckpt.state.ask import Substate
from hyper_ckpt.state.flat_state import FlatState
from hyper_ckpt.state.names import parse_key
from hyper_ckpt.state.parts import differing_parts
from hyper_ckpt.state.tree import (
    KeyedNode,
    NamedTupleNode,
    Node,
    PartsNode,
    SequenceNode,
    StatefulNode,
    TensorNode,
    children,
    unwrap,
    with_items,
)
from hyper_ckpt.state.walk import tensors_below


class Place(NamedTuple):
    """Where a tensor stands in the saved state of an object: the object, its name, and the keys that lead there from
    its state."""

    owner: Any
    owner_name: str
    path: tuple[Any, ...]
    node: TensorNode


@dataclass(frozen=True)
class Adopted:
    """A target whose objects hold what was saved. `places` are the tensors that it then has in them, by name; `flat`
    has those of them that the target has, whatever their shape. `own` names all tensors that each object has."""

    flat: FlatState
    places: dict[str, Place]
    own: dict[str, list[str]]


def adopt(flat: FlatState, saved: Node, fixed: Callable[[Any, Any], Collection[Any] | None]) -> Adopted:
    """Puts the saved state of each object in the place of its own, where it takes that as it was saved.

    Objects inside an object's state are still what they are, and must be in the checkpoint.

    Args:
        fixed: see `Objects.fixed`; asked of an object and its state.
    """
    if not flat.substates:
        return Adopted(flat, {}, {})
    worker = _Adoption(flat, fixed)
    tree = worker.node(flat.tree, saved, None)
    adopted = dataclasses.replace(flat, tree=tree, tensors=worker.tensors, whole=frozenset(worker.whole))
    return Adopted(adopted, worker.places, worker.own)


class _Adoption:
    def __init__(self, flat: FlatState, fixed: Callable[[Any, Any], Collection[Any] | None]) -> None:
        self._flat, self._fixed = flat, fixed
        self._near = set(_ways(flat.substates))
        self.tensors = dict(flat.tensors)
        self.whole: set[str] = set()
        self.places: dict[str, Place] = {}
        self.own: dict[str, list[str]] = {}

    def node(self, target: Node, saved: Node, name: str | None) -> Node:
        """The node of a place outside objects."""
        if isinstance(target, StatefulNode) and name is not None:
            return self._object(target, saved, name)
        saved = unwrap(saved)
        if name is not None and name not in self._near:
            return target
        if isinstance(target, KeyedNode) and isinstance(saved, KeyedNode):
            known = dict(zip(saved.k, saved.v, strict=True))
            named = zip(target.k, children(target, name), strict=True)
            return with_items(
                target, [self.node(item, known[part], at) if part in known else item for part, (at, item) in named]
            )
        if isinstance(target, SequenceNode) and isinstance(saved, SequenceNode) and len(target.v) == len(saved.v):
            pairs = zip(children(target, name), saved.v, strict=True)
            return with_items(target, [self.node(item, each, at) for (at, item), each in pairs])
        return target

    def _object(self, target: StatefulNode, saved: Node, name: str) -> Node:
        substate = self._flat.substates[name]
        fixed = self._fixed(substate.object, substate.state)
        inner, own = unwrap(saved), target.v
        if fixed is None:
            if isinstance(own, KeyedNode) and not isinstance(inner, KeyedNode) and not isinstance(saved, StatefulNode):
                return target  # something else was saved under this name
            self._take_whole(own, name, name)
            return StatefulNode(self._taken(inner, own, Place(substate.object, name, (), _TENSOR), name))
        for each in tensors_below(own, name):  # an object around it may have left them out
            self.tensors[each] = self._flat.tensors[each]
        if isinstance(own, KeyedNode) and isinstance(inner, KeyedNode) and len(fixed) < len(own.k):
            return StatefulNode(self._partly(own, inner, substate, fixed, name))
        return target

    def _partly(self, own: KeyedNode, saved: KeyedNode, substate: Substate, fixed: Collection[Any], name: str) -> Node:
        """What an object with fixed keys holds, with the saved nodes at its other ones."""
        known, items = dict(zip(saved.k, saved.v, strict=True)), []
        for key, part, (at, item) in zip(substate.state, own.k, children(own, name), strict=True):
            taken = key not in fixed and part in known
            if taken:
                self._take_whole(item, at, name)
                item = self._taken(known[part], item, Place(substate.object, name, (key,), _TENSOR), at)
            items.append(item)
        return with_items(own, items)

    def _take_whole(self, own: Node, name: str, owner: str) -> None:
        self.whole.add(name)
        found = tensors_below(own, name)
        self.own.setdefault(owner, []).extend(found)
        for each in found:
            self.tensors.pop(each, None)

    def _taken(self, saved: Node, target: Node, place: Place, name: str) -> Node:
        """A saved node inside an object, noted; `target` is what the object has there, if anything."""
        if isinstance(target, StatefulNode) and name != place.owner_name:
            return self._object(target, saved, name)
        if isinstance(saved, StatefulNode):
            return StatefulNode(self._taken(saved.v, target, place, name))
        if isinstance(saved, PartsNode):
            return self._composed(saved, target, name)
        if isinstance(saved, TensorNode):
            self.places[name] = place._replace(node=saved)
            if name in self._flat.tensors:
                self.tensors[name] = self._flat.tensors[name]
            return saved
        if not isinstance(saved, KeyedNode | SequenceNode):
            return saved
        own = dict(children(target, name)) if isinstance(target, KeyedNode | SequenceNode) else {}
        items = []
        for (at, item), key in zip(children(saved, name), _keys(saved), strict=True):
            inner = Place(place.owner, place.owner_name, (*place.path, key), place.node)
            items.append(self._taken(item, own.get(at), inner, at) if isinstance(item, msgspec.Struct) else item)
        if not isinstance(saved, KeyedNode):
            return with_items(saved, items)
        # Objects that were not saved are missing, as anywhere.
        absent = {at.removeprefix(f"{name}/"): item for at, item in own.items() if at in self._near}
        absent = {part: item for part, item in absent.items() if part not in saved.k}
        return with_items(saved, [*items, *absent.values()], (*saved.k, *absent))

    def _composed(self, saved: PartsNode, target: Node, name: str) -> Node:
        """The object's own tensor that is made of others: one that it lacks cannot be made of a class that a checkpoint
        names."""
        if not isinstance(target, PartsNode):
            raise TargetError(
                f"{name!r} was saved as a tensor of class {saved.kind}, which a load fills, but never makes: give the "
                "object such a tensor first (an optimizer has its moments after a step)"
            )
        found = differing_parts(target, saved)
        if found is not None:
            text = f"{name!r}: the object and the checkpoint have tensors of different kinds: {found}"
            raise ContainerMismatchError(f"{text}. Nothing was loaded: make the object's as it was saved", [text])
        self.tensors |= {each: self._flat.tensors[each] for each in tensors_below(target, name)}
        return target


_TENSOR = TensorNode()


def _keys(node: KeyedNode | SequenceNode) -> Iterator[Any]:
    """The keys of what stands in a container: positions in a list, names in a namedtuple."""
    if isinstance(node, KeyedNode):
        return map(parse_key, node.k)
    return iter(node.fields if isinstance(node, NamedTupleNode) else range(len(node.v)))


def _ways(names: Collection[str]) -> Iterator[str]:
    """The names, and those of all that they lie in."""
    for name in names:
        parts = name.split("/")
        for count in range(1, len(parts) + 1):
            yield "/".join(parts[:count])
