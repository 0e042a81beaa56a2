"""Large plain values leave the tree and become bytes of their own in a data file.

The rule. From the state downwards, a dict is never taken out as a whole: its keys are joined with those
that other ranks hold, and each of them can be compared and reported. A scalar or set above the limit is
taken out. A list, tuple, namedtuple or deque above it is taken out whole if its items that are not large
themselves add up to more than the limit; else each of its items is looked at. A container with a tensor, a
`PerRank` or an object with state_dict anywhere in it stays; so do groups of named parameters, which are joined with
those of other ranks.
"""

from __future__ import annotations

import msgspec
import xxhash

from hyper_ckpt.state.groups import is_groups
from hyper_ckpt.state.tree import (
    BlobNode,
    KeyedNode,
    Node,
    SequenceNode,
    StatefulNode,
    TensorNode,
    children,
    count_of,
    encode_tree,
    is_plain,
    kind_of,
    with_items,
)

BLOB_LIMIT = 64 << 10
"""Bytes that a plain value may take in the tree."""


def take_blobs(tree: Node) -> tuple[Node, dict[str, bytes]]:
    """The tree with a `BlobNode` for each large plain value, and their bytes by name."""
    blobs: dict[str, bytes] = {}
    return _taken(tree, None, blobs), blobs


def _taken(node: Node, name: str | None, blobs: dict[str, bytes]) -> Node:
    if isinstance(node, TensorNode) or not isinstance(node, msgspec.Struct | str):
        return node
    data = encode_tree(node)
    if len(data) <= BLOB_LIMIT or is_groups(node, name):
        return node
    if name is not None and _is_taken_whole(node):
        blobs[name] = data
        return BlobNode(len(data), xxhash.xxh3_128_hexdigest(data), kind_of(node), count_of(node))
    if isinstance(node, StatefulNode):
        return StatefulNode(_taken(node.v, name, blobs))
    if isinstance(node, KeyedNode | SequenceNode):
        return with_items(node, [_taken(child, child_name, blobs) for child_name, child in children(node, name)])
    return node


def _is_taken_whole(node: Node) -> bool:
    if isinstance(node, KeyedNode) or not is_plain(node):
        return False
    if not isinstance(node, SequenceNode):
        return True
    sizes = (len(encode_tree(item)) for item in node.v)
    return sum(size for size in sizes if size <= BLOB_LIMIT) > BLOB_LIMIT
