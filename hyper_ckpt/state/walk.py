"""Questions about a whole tree."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hyper_ckpt.state.names import variant_name
from hyper_ckpt.state.tree import (
    BlobNode,
    KeyedNode,
    Node,
    PerRankNode,
    RanksNode,
    SequenceNode,
    StatefulNode,
    TensorNode,
    child_names,
    children,
    encode_tree,
    has_blobs,
    has_only_leaves,
    with_items,
)


def _walk(tree: Node) -> Iterator[tuple[str, Node]]:
    """All nodes below the root, with names, in the order of the state."""
    names: list[str] = []
    nodes: list[Node] = []
    _note(tree, None, names, nodes)
    return zip(names, nodes, strict=True)


def _note(node: Node, name: str | None, names: list[str], nodes: list[Node]) -> None:
    if isinstance(node, StatefulNode | RanksNode):  # they add no part to names
        for variant in [node.v] if isinstance(node, StatefulNode) else [variant for _, variant in node.v]:
            if name is not None:
                names.append(name)
                nodes.append(variant)
            _note(variant, name, names, nodes)
        return
    if not isinstance(node, KeyedNode | SequenceNode):
        return
    if has_only_leaves(node):
        names += child_names(node, name)
        nodes += node.v
        return
    for child_name, child in children(node, name):
        names.append(child_name)
        nodes.append(child)
        _note(child, child_name, names, nodes)


def all_names(tree: Node) -> list[str]:
    """Every name below the root, of leaves and containers, in the order of the state."""
    return list(dict.fromkeys([name for name, _ in _walk(tree)]))


def tensor_names(tree: Node) -> list[str]:
    """The names that all tensors are stored under, in the order of the state."""
    found = [(name, node.rank) for name, node in _walk(tree) if isinstance(node, TensorNode)]
    return list(dict.fromkeys([name if rank is None else variant_name(name, rank) for name, rank in found]))


def tensors_below(node: Node, name: str) -> list[str]:
    """The names of all tensors of a subtree that stands at `name`, itself included."""
    names, nodes = [name], [node]
    _note(node, name, names, nodes)
    found = zip(names, nodes, strict=True)
    return list(dict.fromkeys([at for at, each in found if isinstance(each, TensorNode)]))


def blob_owners(tree: Node) -> list[tuple[str, int]]:
    """The blobs of a merged tree: name, and the rank that stores it. A name may come with several ranks."""
    return [(name, blob.rank) for name, blob in blobs(tree) if blob.rank is not None]


def blobs(tree: Node) -> list[tuple[str, BlobNode]]:
    """The blobs of a tree with their names."""
    if not has_blobs(encode_tree(tree)):
        return []
    return [(name, node) for name, node in _walk(tree) if isinstance(node, BlobNode)]


def prune(tree: Node, keys: Collection[str]) -> tuple[Node, list[str]]:
    """The part of a tree whose names are in `keys` or below one of them, and the keys that name nothing.

    Dicts lose their other keys; of a list or tuple, all stays that is needed to keep its length.
    """
    found: set[str] = set()
    kept = _pruned(tree, None, keys, found)
    return kept if kept is not None else with_items(tree, (), ()), [k for k in keys if k not in found]  # type: ignore[arg-type]


def _pruned(node: Node, name: str | None, keys: Collection[str], found: set[str]) -> Node | None:
    if name in keys:
        found.add(name)  # type: ignore[arg-type]
        return node
    if isinstance(node, StatefulNode):
        inner = _pruned(node.v, name, keys, found)
        return None if inner is None else StatefulNode(inner)
    if isinstance(node, KeyedNode):
        kept = [
            (k, c)
            for k, (n, child) in zip(node.k, children(node, name), strict=True)
            if (c := _pruned(child, n, keys, found)) is not None
        ]
        return with_items(node, [c for _, c in kept], tuple(k for k, _ in kept)) if kept else None
    parts = [_pruned(child, n, keys, found) for n, child in children(node, name)]
    return node if any(p is not None for p in parts) else None


def drop(node: Node, names: Collection[str], name: str | None = None) -> Node:
    """A tree without some leaves: dicts lose them, in lists and tuples None stands for them."""
    if isinstance(node, StatefulNode):
        return StatefulNode(drop(node.v, names, name))
    if isinstance(node, KeyedNode):
        found = [(k, c, n) for k, (n, c) in zip(node.k, children(node, name), strict=True) if n not in names]
        return with_items(node, [drop(c, names, n) for _, c, n in found], tuple(k for k, _, _ in found))
    if isinstance(node, SequenceNode):
        return with_items(node, [None if n in names else drop(c, names, n) for n, c in children(node, name)])
    return node


def values_by_kind(tree: Node) -> dict[str, str]:
    """The names of all leaves that are no tensors, and how each is kept: plain, blob, per_rank or ranks."""
    out: dict[str, str] = {}
    for name, node in _walk(tree):
        if isinstance(node, KeyedNode | SequenceNode | StatefulNode | TensorNode):
            continue
        kinds: dict[type, str] = {PerRankNode: "per_rank", BlobNode: "blob", RanksNode: "ranks"}
        out.setdefault(name, kinds.get(type(node), "plain"))
    return out
