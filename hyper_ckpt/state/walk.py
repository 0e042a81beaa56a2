"""Questions about a whole tree."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hyper_ckpt.state.tree import (
    BlobNode,
    KeyedNode,
    Node,
    PerRankNode,
    RanksNode,
    SequenceNode,
    StatefulNode,
    TensorNode,
    children,
    encode_tree,
    has_blobs,
    with_items,
)

_INNER = (KeyedNode, SequenceNode, StatefulNode, RanksNode)


def _walk(node: Node, name: str | None) -> Iterator[tuple[str | None, Node]]:
    yield name, node
    if isinstance(node, StatefulNode):
        yield from _walk(node.v, name)
    elif isinstance(node, RanksNode):
        for _, variant in node.v:
            yield from _walk(variant, name)
    else:
        for child_name, child in children(node, name):
            if isinstance(child, _INNER):
                yield from _walk(child, child_name)
            else:  # most are leaves: no generator for each
                yield child_name, child


def all_names(tree: Node) -> list[str]:
    """Every name below the root, of leaves and containers, in the order of the state."""
    return list(dict.fromkeys(name for name, _ in _walk(tree, None) if name is not None))


def tensor_names(tree: Node) -> list[str]:
    """The names of all tensors, in the order of the state."""
    return list(
        dict.fromkeys(name for name, node in _walk(tree, None) if isinstance(node, TensorNode) and name is not None)
    )


def blob_owners(tree: Node) -> list[tuple[str, int]]:
    """The blobs of a merged tree: name, and the rank that stores it. A name may come with several ranks."""
    return [(name, blob.rank) for name, blob in blobs(tree) if blob.rank is not None]


def blobs(tree: Node) -> list[tuple[str, BlobNode]]:
    """The blobs of a tree with their names."""
    if not has_blobs(encode_tree(tree)):
        return []
    return [(name, node) for name, node in _walk(tree, None) if isinstance(node, BlobNode) and name is not None]


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


def values_by_kind(tree: Node) -> dict[str, str]:
    """The names of all leaves that are no tensors, and how each is kept: plain, blob, per_rank or ranks."""
    out: dict[str, str] = {}
    for name, node in _walk(tree, None):
        if name is None or isinstance(node, KeyedNode | SequenceNode | StatefulNode | TensorNode):
            continue
        kinds: dict[type, str] = {PerRankNode: "per_rank", BlobNode: "blob", RanksNode: "ranks"}
        out.setdefault(name, kinds.get(type(node), "plain"))
    return out
