"""A saved state under the names that a target uses: leaves moved to where the target looks for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from hyper_ckpt.state.names import join
from hyper_ckpt.state.tree import (
    DictNode,
    KeyedNode,
    Node,
    PartsNode,
    SequenceNode,
    StatefulNode,
    children,
    unwrap,
    with_items,
)


@dataclass(frozen=True)
class Renamed:
    """A saved tree in which leaves have moved; where they came from: saved names by the target's; and saved names that
    can no longer be seen, since another leaf took their place.

    `absent` are the target's names whose saved ones are not there, with those; `stuck` the ones among them that stand
    in a list or tuple, which cannot do without them.
    """

    tree: Node
    moved: Mapping[str, str]
    hidden: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    stuck: tuple[str, ...] = ()


def rename(saved: Node, target: Node, source_of: Callable[[str], str | None], whole: Collection[str] = ()) -> Renamed:
    """Moves leaves of `saved` to the names of the target's leaves.

    Args:
        source_of: the saved name of one of the target's leaves; None if that is its own.
        whole: names of objects that take what was saved as it was saved. These move as a whole, if `source_of` has a
            container for the object's own name, or finds all its leaves below another name, as they are in the target.
    """
    leaves = _leaves(saved)
    worker = _Renamer(saved, leaves, source_of, whole)
    placed = worker.place(target, saved, None)
    sources = set(worker.moved.values())
    gone = sources - worker.moved.keys() - worker.direct | set(worker.objects.values()) - worker.objects.keys()
    kept = _without(placed, gone, None)
    hidden = tuple(name for name in worker.moved if name in leaves and name not in sources)
    tree = kept if kept is not None else with_items(saved, (), ())  # type: ignore[arg-type]
    return Renamed(tree, worker.moved, hidden, worker.absent, tuple(worker.stuck))


class _Renamer:
    def __init__(
        self,
        saved: Node,
        leaves: Mapping[str, Node],
        source_of: Callable[[str], str | None],
        whole: Collection[str],
    ) -> None:
        self._saved, self._leaves, self._source_of, self._whole = saved, leaves, source_of, whole
        self._composed = _composed(saved)
        self.moved: dict[str, str] = {}
        self.objects: dict[str, str] = {}
        self.direct: set[str] = set()
        self.absent: dict[str, str] = {}
        self.stuck: list[str] = []

    def place(self, target: Node, saved: Node | None, name: str | None) -> Node | None:
        """What was saved, with the target's leaves below `name` put where the target has them; None: nothing."""
        if isinstance(target, StatefulNode):
            found = self._object(target.v, name) if name in self._whole and name is not None else None
            if found is not None:
                return found
            inner = self.place(target.v, saved.v if isinstance(saved, StatefulNode) else saved, name)
            return StatefulNode(inner) if inner is not None else None
        if isinstance(target, SequenceNode):
            return self._items(target, saved, name)
        if not isinstance(target, KeyedNode):
            return self._leaf(saved, name)
        if saved is not None and not isinstance(saved, KeyedNode):
            return saved
        known = dict(zip(saved.k, saved.v, strict=True)) if saved is not None else {}
        for key, child in zip(target.k, target.v, strict=True):
            placed = self.place(child, known.get(key), join(name, key))
            if placed is not None:
                known[key] = placed
            else:
                known.pop(key, None)
        if saved is None and not known:
            return None
        like = saved if saved is not None else self._source_kind(target, name)
        return with_items(like, known.values(), tuple(known))

    def _source_kind(self, target: KeyedNode, name: str | None) -> KeyedNode:
        """The kind of a container that was not saved here: the target's. But of a tensor that is made of others, the
        one that its parts came from says what it is; if they came from elsewhere, they are only a dict."""
        if not isinstance(target, PartsNode):
            return target
        sources = {self.moved.get(child, child).rpartition("/")[0] for child, _ in children(target, name)}
        found = self._composed.get(sources.pop()) if len(sources) == 1 else None
        return found if found is not None else DictNode((), ())

    def _object(self, target: Node, name: str) -> Node | None:
        """All that was saved of an object that had another name; None where there is no such name."""
        for source in (self._source_of(name), self._common_source(target, name)):
            node = _find(self._saved, source.split("/")) if source is not None and source != name else None
            if source is not None and isinstance(node, KeyedNode | SequenceNode | StatefulNode):
                self.objects[name] = source
                self.moved |= {name + leaf.removeprefix(source): leaf for leaf in _leaves(node, source)}
                return node
        return None

    def _common_source(self, target: Node, name: str) -> str | None:
        """The name below which all of an object's leaves were saved under the names that they have below `name`."""
        found = set()
        for leaf in _leaves(target, name):
            end, source = leaf.removeprefix(name), self._source_of(leaf)
            found.add(source.removesuffix(end) if source is not None and end and source.endswith(end) else None)
        return found.pop() if len(found) == 1 else None

    def _items(self, target: SequenceNode, saved: Node | None, name: str | None) -> Node | None:
        """A list or tuple, item by item, if the saved one has as many or is not there at all."""
        if saved is not None and not (isinstance(saved, SequenceNode) and len(saved.v) == len(target.v)):
            return saved
        own: tuple[Node | None, ...] = saved.v if saved is not None else (None,) * len(target.v)
        placed: list[Node] = []
        for (child_name, child), item in zip(children(target, name), own, strict=True):
            found = self.place(child, item, child_name)
            if found is None and item is not None:
                self.stuck.append(child_name)
                found = item
            if found is None:
                return None
            placed.append(found)
        return with_items(saved if saved is not None else target, placed) if placed or saved is not None else None

    def _leaf(self, saved: Node | None, name: str | None) -> Node | None:
        source = self._source_of(name) if name is not None else None
        if name is None or source is None or source == name:
            self.direct.add(name or "")
            return saved
        if source not in self._leaves:
            self.absent[name] = source
            return None
        self.moved[name] = source
        return self._leaves[source]


def _find(node: Node, parts: list[str]) -> Node | None:
    """What stands in a place; None: there is no such place."""
    if not parts:
        return node
    node = unwrap(node)
    below = dict(children(node, None))
    return _find(below[parts[0]], parts[1:]) if parts[0] in below else None


def _leaves(node: Node, name: str | None = None) -> dict[str, Node]:
    """What is no container, by name."""
    if isinstance(node, StatefulNode):
        return _leaves(node.v, name)
    if not isinstance(node, KeyedNode | SequenceNode):
        return {} if name is None else {name: node}
    out: dict[str, Node] = {}
    for child_name, child in children(node, name):
        out |= _leaves(child, child_name)
    return out


def _composed(node: Node, name: str | None = None) -> dict[str, PartsNode]:
    """The tensors that are made of others, by name."""
    if isinstance(node, StatefulNode):
        return _composed(node.v, name)
    out = {name: node} if isinstance(node, PartsNode) and name is not None else {}
    for child_name, child in children(node, name):
        out |= _composed(child, child_name)
    return out


def _without(node: Node | None, gone: Collection[str], name: str | None) -> Node | None:
    """The tree without what has moved away, and without the dicts that held nothing else."""
    if name in gone:
        return None
    if isinstance(node, StatefulNode):
        inner = _without(node.v, gone, name)
        return StatefulNode(inner) if inner is not None else None
    if not isinstance(node, KeyedNode):
        return node
    found = [(key, _without(child, gone, join(name, key))) for key, child in zip(node.k, node.v, strict=True)]
    kept = [(key, child) for key, child in found if child is not None]
    if node.k and not kept:
        return None
    return with_items(node, [child for _, child in kept], tuple(key for key, _ in kept))
