"""Tensors of one name that differ between ranks: a variant of its own for each set of ranks that hold equal ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from hyper_ckpt.state.names import variant_name
from hyper_ckpt.state.tree import (
    KeyedNode,
    Node,
    RanksNode,
    SequenceNode,
    StatefulNode,
    TensorNode,
    children,
    with_items,
)

Groups = tuple[tuple[int, ...], ...]
"""Sets of ranks that hold equal tensors, each sorted, lowest first."""


def label_of(groups: Groups, rank: int) -> int | None:
    """The lowest rank of the group of `rank`, by which its variant is stored; None where the rank holds none."""
    return next((ranks[0] for ranks in groups if rank in ranks), None)


def keep_variants(tree: Node, groups: Mapping[str, Groups]) -> Node:
    """The tree with a node of each group where ranks hold different tensors.

    Args:
        groups: by the names of such tensors.
    """
    return _kept(tree, None, groups) if groups else tree


def variants_of(tree: Node) -> dict[str, tuple[tuple[tuple[int, ...], str], ...]]:
    """By the names of tensors that differ between ranks: the ranks of each variant, and the name it is stored under."""
    found: dict[str, dict[tuple[int, ...], str]] = {}
    for ranks, name, node in _inside_ranks(tree, None, None):
        if node.rank is not None:
            found.setdefault(name, {})[ranks] = variant_name(name, node.rank)
    return {name: tuple(sorted(each.items())) for name, each in found.items()}


def labelled(node: Node, name: str | None) -> dict[str, str]:
    """The variants in one rank's part of a tree: by name, the name that each is stored under."""
    found = _tensors(node, name)
    return {name: variant_name(name, tensor.rank) for name, tensor in found if tensor.rank is not None}


def unlabelled(node: Node) -> Node:
    """One rank's part of a tree with tensors that are just called by their place."""
    if isinstance(node, TensorNode):
        return msgspec.structs.replace(node, rank=None) if node.rank is not None else node
    if isinstance(node, StatefulNode):
        return StatefulNode(unlabelled(node.v))
    return with_items(node, map(unlabelled, node.v)) if isinstance(node, KeyedNode | SequenceNode) else node


def _kept(node: Node, name: str | None, groups: Mapping[str, Groups]) -> Node:
    if isinstance(node, TensorNode):
        found = groups.get(name or "")
        if found is None:
            return node
        return RanksNode(tuple((ranks, msgspec.structs.replace(node, rank=ranks[0])) for ranks in found))
    if isinstance(node, RanksNode):
        return RanksNode(tuple(part for ranks, each in node.v for part in _split(ranks, each, name, groups)))
    if isinstance(node, StatefulNode):
        return StatefulNode(_kept(node.v, name, groups))
    if not isinstance(node, KeyedNode | SequenceNode):
        return node
    return with_items(node, [_kept(child, at, groups) for at, child in children(node, name)])


def _split(
    ranks: tuple[int, ...], node: Node, name: str | None, groups: Mapping[str, Groups]
) -> Iterator[tuple[tuple[int, ...], Node]]:
    """A part of the tree that belongs to some ranks, once for each set of them that hold equal tensors in it."""
    inside = [each for each, _ in _tensors(node, name) if each in groups]
    members: dict[tuple[int | None, ...], list[int]] = {}
    for rank in ranks:
        members.setdefault(tuple(label_of(groups[each], rank) for each in inside), []).append(rank)
    for labels, own in members.items():
        yield tuple(own), _labelled(node, name, dict(zip(inside, labels, strict=True)))


def _labelled(node: Node, name: str | None, labels: Mapping[str, int | None]) -> Node:
    if isinstance(node, TensorNode):
        return msgspec.structs.replace(node, rank=labels.get(name or ""))
    if isinstance(node, StatefulNode):
        return StatefulNode(_labelled(node.v, name, labels))
    if not isinstance(node, KeyedNode | SequenceNode):
        return node
    return with_items(node, [_labelled(child, at, labels) for at, child in children(node, name)])


def _tensors(node: Node, name: str | None) -> Iterator[tuple[str, TensorNode]]:
    """The tensors in one rank's part of a tree."""
    return ((at, tensor) for _, at, tensor in _inside_ranks(node, name, ()))


def _inside_ranks(
    node: Node, name: str | None, ranks: tuple[int, ...] | None
) -> Iterator[tuple[tuple[int, ...], str, TensorNode]]:
    """The tensors that belong to some ranks only, with these. None: whatever is met belongs to all."""
    if isinstance(node, TensorNode):
        if ranks is not None:
            yield ranks, name or "", node
    elif isinstance(node, RanksNode):
        for own, each in node.v:
            yield from _inside_ranks(each, name, own)
    elif isinstance(node, StatefulNode):
        yield from _inside_ranks(node.v, name, ranks)
    elif isinstance(node, KeyedNode | SequenceNode):
        for at, child in children(node, name):
            yield from _inside_ranks(child, at, ranks)
