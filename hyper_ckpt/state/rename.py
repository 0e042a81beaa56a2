"""A saved state under the names that a target uses: leaves moved to where the target looks for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from hyper_ckpt.state.names import join
from hyper_ckpt.state.tree import KeyedNode, Node, SequenceNode, StatefulNode, children, with_items


@dataclass(frozen=True)
class Renamed:
    """A saved tree in which leaves have moved; where they came from: saved names by the target's; and saved names that
    can no longer be seen, since another leaf took their place."""

    tree: Node
    moved: Mapping[str, str]
    hidden: tuple[str, ...] = ()


def rename(saved: Node, target: Node, source_of: Callable[[str], str | None]) -> Renamed:
    """Moves leaves of `saved` to the names of the target's leaves.

    Only through dicts: what stands in a list or tuple of the target has the name it was saved under.

    Args:
        source_of: the saved name of one of the target's leaves; None if it is not saved under another one.
    """
    leaves = _leaves(saved)
    worker = _Renamer(leaves, source_of)
    placed = worker.place(target, saved, None)
    sources = set(worker.moved.values())
    gone = sources - worker.moved.keys() - worker.direct
    kept = _without(placed, gone, None)
    hidden = tuple(name for name in worker.moved if name in leaves and name not in sources)
    return Renamed(kept if kept is not None else with_items(saved, (), ()), worker.moved, hidden)  # type: ignore[arg-type]


class _Renamer:
    def __init__(self, leaves: Mapping[str, Node], source_of: Callable[[str], str | None]) -> None:
        self._leaves, self._source_of = leaves, source_of
        self.moved: dict[str, str] = {}
        self.direct: set[str] = set()

    def place(self, target: Node, saved: Node | None, name: str | None) -> Node | None:
        """What was saved, with the target's leaves below `name` put where the target has them; None: nothing."""
        if isinstance(target, StatefulNode):
            inner = self.place(target.v, saved.v if isinstance(saved, StatefulNode) else saved, name)
            return StatefulNode(inner) if inner is not None else None
        if not isinstance(target, KeyedNode):
            return saved if isinstance(target, SequenceNode) else self._leaf(saved, name)
        if saved is not None and not isinstance(saved, KeyedNode):
            return saved
        known = dict(zip(saved.k, saved.v, strict=True)) if saved is not None else {}
        for key, child in zip(target.k, target.v, strict=True):
            placed = self.place(child, known.get(key), join(name, key))
            if placed is not None:
                known[key] = placed
        if saved is None and not known:
            return None
        return with_items(saved if saved is not None else target, known.values(), tuple(known))

    def _leaf(self, saved: Node | None, name: str | None) -> Node | None:
        source = self._source_of(name) if name is not None else None
        if name is None or source is None or source == name or source not in self._leaves:
            self.direct.add(name or "")
            return saved
        self.moved[name] = source
        return self._leaves[source]


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


def _without(node: Node | None, gone: Collection[str], name: str | None) -> Node | None:
    """The tree without the leaves that have moved away, and without the dicts that held nothing else."""
    if isinstance(node, StatefulNode):
        inner = _without(node.v, gone, name)
        return StatefulNode(inner) if inner is not None else None
    if not isinstance(node, KeyedNode):
        return None if name in gone else node
    found = [(key, _without(child, gone, join(name, key))) for key, child in zip(node.k, node.v, strict=True)]
    kept = [(key, child) for key, child in found if child is not None]
    if node.k and not kept:
        return None
    return with_items(node, [child for _, child in kept], tuple(key for key, _ in kept))
