"""The trees of several ranks made one, and the tree of one rank taken out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from hyper_ckpt.state.digests import canonical
from hyper_ckpt.state.groups import is_groups, join_groups
from hyper_ckpt.state.names import join
from hyper_ckpt.state.parts import differing_parts
from hyper_ckpt.state.tree import (
    BlobNode,
    DefaultDictNode,
    DequeNode,
    KeyedNode,
    NamedTupleNode,
    NamespaceNode,
    Node,
    PartsNode,
    PerRankNode,
    RanksNode,
    SequenceNode,
    StatefulNode,
    TensorNode,
    children,
    encode_tree,
    has_blobs,
    has_only_leaves,
    with_items,
)
from hyper_ckpt.state.variants import Groups, labelled, unlabelled

Variant = tuple[Sequence[int], Node]
"""Ranks, and the node that each of them holds."""


@dataclass(frozen=True)
class Conflict:
    """Ranks hold different values under one name: the ranks of each value, lowest first."""

    name: str
    ranks: tuple[tuple[int, ...], ...]


Whose = int | Literal["own", "lowest"]
"""Whose of the different values under one name: a rank's own, the lowest rank's, or a certain rank's."""


@dataclass(frozen=True)
class Selection:
    """The tree of one rank.

    Args:
        borrowed: names of values that this rank never held and got from the lowest rank that did.
        stored: of tensors that differ between ranks, the names that this rank's variants are stored under, by name.
        ranks: of the same tensors, the ranks that hold this rank's variant.
        undecided: names of tensors that differ between ranks, none of which is this rank's, with the ranks of each.
    """

    tree: Node
    borrowed: tuple[str, ...]
    stored: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    undecided: Mapping[str, Groups] = field(default_factory=dict)


def merge(trees: Sequence[Variant]) -> tuple[Node, list[Conflict]]:
    """The union of the states of groups of ranks; the ranks of a group hold equal trees.

    Dicts are joined: a key that only some ranks hold is simply there, as in pipeline stages. Lists, tuples
    and the like of equal kind and length are joined item by item if they hold any container, tensor or
    payload; else they are values. Groups of named parameters are joined by these names (`groups`). Where values
    differ each is kept for its ranks, and a conflict says so.

    Args:
        trees: in the order in which their keys shall stand.
    """
    conflicts: list[Conflict] = []
    return _merged(list(trees), None, conflicts), conflicts


def select(tree: Node, rank: int, *, whose: Whose = "own", saved_by_these: bool = True) -> Selection:
    """The tree as `rank` saved it, in any other world too: a rank that did not save gets the lowest rank's values. Of
    tensors that differ it gets its own only if `saved_by_these`: if the ranks are those that saved.

    Args:
        whose: which of the different values under one name.
    """
    chosen = _Choice(rank if isinstance(whose, str) else whose, whose, saved_by_these)
    made = chosen.selected(tree, None)
    return Selection(made, tuple(chosen.borrowed), chosen.stored, chosen.ranks, chosen.undecided)


def _merged(variants: list[Variant], name: str | None, conflicts: list[Conflict]) -> Node:
    ranks, first = variants[0]
    if len(variants) == 1:
        return _owned(first, min(ranks))
    nodes = [node for _, node in variants]
    if isinstance(first, TensorNode | PerRankNode) and all(type(node) is type(first) for node in nodes):
        return first
    if isinstance(first, StatefulNode) and all(isinstance(node, StatefulNode) for node in nodes):
        inner = [(each, node.v) for each, node in variants if isinstance(node, StatefulNode)]
        return StatefulNode(_merged(inner, name, conflicts))
    if isinstance(first, KeyedNode) and all(_alike(first, node) for node in nodes):
        return _joined(first, variants, name, conflicts)
    joined = join_groups(nodes) if all(is_groups(node, name) for node in nodes) else None
    if joined is not None:
        return joined
    if isinstance(first, SequenceNode) and all(_alike(first, node) for node in nodes) and not _is_value(nodes):
        return _itemwise(first, variants, name, conflicts)
    return _either(variants, name, conflicts)


def _alike(one: KeyedNode | SequenceNode, other: Node) -> bool:
    """Whether two containers are of one kind, and lists also of one length."""
    if type(one) is not type(other):
        return False
    if isinstance(one, DefaultDictNode) and isinstance(other, DefaultDictNode):
        return one.factory == other.factory
    if isinstance(one, DequeNode) and isinstance(other, DequeNode) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, NamedTupleNode) and isinstance(other, NamedTupleNode):
        return (one.module, one.name, one.fields) == (other.module, other.name, other.fields)
    if isinstance(one, NamespaceNode) and isinstance(other, NamespaceNode):
        return one.of == other.of
    if isinstance(one, PartsNode) and isinstance(other, PartsNode):
        return differing_parts(one, other) is None
    return isinstance(one, KeyedNode) or (isinstance(other, SequenceNode) and len(one.v) == len(other.v))


def _is_value(nodes: list[Node]) -> bool:
    """Whether these lists hold only scalars: half of one and half of another would be a value that no rank had."""
    items = (item for node in nodes if isinstance(node, SequenceNode) for item in node.v)
    return not any(
        isinstance(item, KeyedNode | SequenceNode | TensorNode | PerRankNode | StatefulNode) for item in items
    )


def _joined(first: KeyedNode, variants: list[Variant], name: str | None, conflicts: list[Conflict]) -> Node:
    holders: dict[str, list[Variant]] = {}
    for ranks, node in variants:
        if isinstance(node, KeyedNode):
            for key, item in zip(node.k, node.v, strict=True):
                holders.setdefault(key, []).append((ranks, item))
    items = [_merged(each, join(name, key), conflicts) for key, each in holders.items()]
    return with_items(first, items, tuple(holders))


def _itemwise(first: SequenceNode, variants: list[Variant], name: str | None, conflicts: list[Conflict]) -> Node:
    columns = [[(ranks, item) for item in node.v] for ranks, node in variants if isinstance(node, SequenceNode)]
    named = zip(children(first, name), zip(*columns, strict=True), strict=True)
    return with_items(first, [_merged(list(each), child_name, conflicts) for (child_name, _), each in named])


def _either(variants: list[Variant], name: str | None, conflicts: list[Conflict]) -> Node:
    """One node if all are equal, else a node that keeps each distinct one for its ranks."""
    groups: dict[bytes, tuple[list[int], Node]] = {}
    for ranks, node in variants:
        groups.setdefault(encode_tree(canonical(node)), ([], node))[0].extend(ranks)
    kept = sorted(((tuple(sorted(ranks)), node) for ranks, node in groups.values()), key=lambda group: group[0])
    owned = tuple((ranks, _owned(node, ranks[0])) for ranks, node in kept)
    if len(owned) == 1:
        return owned[0][1]
    conflicts.append(Conflict("" if name is None else name, tuple(ranks for ranks, _ in owned)))
    return RanksNode(owned)


def _owned(node: Node, rank: int) -> Node:
    """The node with `rank` as the holder of its blobs; the same object if it has none."""
    return _with_holder(node, rank) if has_blobs(encode_tree(node)) else node


def _with_holder(node: Node, rank: int) -> Node:
    if isinstance(node, BlobNode):
        return msgspec.structs.replace(node, rank=rank)
    if isinstance(node, StatefulNode):
        inner = _with_holder(node.v, rank)
        return node if inner is node.v else StatefulNode(inner)
    if isinstance(node, KeyedNode | SequenceNode):
        items = [_with_holder(item, rank) if isinstance(item, msgspec.Struct) else item for item in node.v]
        unchanged = all(new is old for new, old in zip(items, node.v, strict=True))
        return node if unchanged else with_items(node, items)
    return node


class _Choice:
    """Takes the tree of one rank out of that of all, and notes what it chose. The arguments are as in `select`."""

    def __init__(self, rank: int, whose: Whose, saved_by_these: bool) -> None:
        self._rank, self._whose, self._saved_by_these = rank, whose, saved_by_these
        self.borrowed: list[str] = []
        self.stored: dict[str, str] = {}
        self.ranks: dict[str, tuple[int, ...]] = {}
        self.undecided: dict[str, Groups] = {}

    def selected(self, node: Node, name: str | None) -> Node:
        if isinstance(node, RanksNode):
            return self._chosen(node, name)
        if isinstance(node, StatefulNode):
            return StatefulNode(self.selected(node.v, name))
        if not isinstance(node, KeyedNode | SequenceNode) or has_only_leaves(node):
            return node
        items = [
            self.selected(item, child_name) if isinstance(item, msgspec.Struct) else item
            for child_name, item in children(node, name)
        ]
        return with_items(node, items)

    def _chosen(self, node: RanksNode, name: str | None) -> Node:
        lowest = min(node.v, key=lambda each: min(each[0]))
        own = lowest if self._whose == "lowest" else next((each for each in node.v if self._rank in each[0]), None)
        ranks, variant = own or lowest
        stored = labelled(variant, name)
        if not stored:
            if own is None:
                self.borrowed.append("" if name is None else name)
            return variant
        if own is None or (self._whose == "own" and not self._saved_by_these):
            self.undecided |= dict.fromkeys(stored, tuple(sorted(each for each, _ in node.v)))
        self.stored |= stored
        self.ranks |= dict.fromkeys(stored, ranks)
        return unlabelled(variant)
