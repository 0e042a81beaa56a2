"""What two ranks compare first: the skeleton of their states, and one digest of their plain values.

Neither depends on the order of keys.
"""

from __future__ import annotations

import msgspec
import xxhash

from hyper_ckpt.state.tree import (
    KeyedNode,
    NamedTupleNode,
    Node,
    PartsNode,
    PerRankNode,
    RanksNode,
    SequenceNode,
    StatefulNode,
    TensorNode,
    encode_tree,
    kind_of,
    with_items,
)

_PLAIN = "plain"
_Skeleton = str | list["_Skeleton"]


def skeleton(tree: Node) -> bytes:
    """The kinds of containers, their keys, and where tensors, payloads and objects stand.

    A subtree without any of these is only "plain", whatever it holds; so states that differ in plain
    values, or in the lengths of lists of them, have equal skeletons.
    """
    return msgspec.json.encode(_skeleton(tree))


def values_digest(tree: Node) -> bytes:
    """16 bytes over every plain value and its place. Empty containers are values; tensors are not."""
    plain, any_plain = _plain_part(tree)
    return xxhash.xxh3_128_digest(encode_tree(canonical(plain)) if any_plain else b"")


def canonical(node: Node) -> Node:
    """The node with the keys of every dict sorted: equal states have equal encodings."""
    if not isinstance(node, msgspec.Struct):
        return node
    if isinstance(node, KeyedNode):
        order = sorted(range(len(node.k)), key=node.k.__getitem__)
        keys = tuple([node.k[i] for i in order])
        return with_items(node, [canonical(node.v[i]) for i in order], keys)
    if isinstance(node, SequenceNode):
        return with_items(node, map(canonical, node.v))
    if isinstance(node, StatefulNode):
        return StatefulNode(canonical(node.v))
    if isinstance(node, RanksNode):
        return RanksNode(tuple((ranks, canonical(variant)) for ranks, variant in node.v))
    return node


def _skeleton(node: Node) -> _Skeleton:
    if isinstance(node, TensorNode):
        return "tensor"
    if isinstance(node, PerRankNode):
        return "per_rank"
    if isinstance(node, StatefulNode):
        return ["stateful", _skeleton(node.v)]
    if not isinstance(node, KeyedNode | SequenceNode):
        return _PLAIN
    inner = [_skeleton(item) for item in node.v]
    if all(item == _PLAIN for item in inner) and not isinstance(node, PartsNode):
        return _PLAIN
    head: list[_Skeleton] = [kind_of(node) or ""]
    if isinstance(node, NamedTupleNode):
        head.append([node.module, node.name, *node.fields])
    if isinstance(node, PartsNode):
        head.append([node.kind, encode_tree(canonical(node.context)).decode()])
    if isinstance(node, KeyedNode):
        pairs = sorted(zip(node.k, inner, strict=True), key=lambda pair: pair[0])
        return [*head, *([key, item] for key, item in pairs)]
    return [*head, *inner]


def _plain_part(node: Node) -> tuple[Node, bool]:
    """The node without tensors, payloads, and dict entries that hold nothing else; and whether anything is left."""
    if isinstance(node, TensorNode | PerRankNode):
        return None, False
    if isinstance(node, StatefulNode):
        return _plain_part(node.v)
    if not isinstance(node, KeyedNode | SequenceNode) or not node.v:
        return node, True
    parts = [_plain_part(item) for item in node.v]
    if not any(left for _, left in parts):
        return None, False
    if isinstance(node, KeyedNode):
        kept = [(key, part) for key, (part, left) in zip(node.k, parts, strict=True) if left]
        keys, items = tuple(key for key, _ in kept), tuple(part for _, part in kept)
        return with_items(node, items, keys), True
    # Places matter in a list: what is not plain leaves a mark.
    return with_items(node, [part if left else TensorNode() for part, left in parts]), True
