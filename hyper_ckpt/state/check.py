"""Bytes to a tree, trusting nothing: what is returned has the shape that `flatten` and `merge` give.

Types and required fields are checked by msgspec while it decodes; here is what types can't say.
"""

from __future__ import annotations

import math

import msgspec

from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.errors import ManifestError, UnsupportedDtypeError
from hyper_ckpt.state.names import parse_key, shown
from hyper_ckpt.state.tree import (
    MAX_DEPTH,
    BlobNode,
    DequeNode,
    FrozenSetNode,
    KeyedNode,
    NamedTupleNode,
    Node,
    PartsNode,
    PerRankNode,
    RanksNode,
    RawNode,
    SequenceNode,
    SetNode,
    SliceNode,
    StatefulNode,
    TensorNode,
    children,
    encode_tree,
    is_plain,
)
from hyper_ckpt.strict_json import refuse_duplicates

_DECODER: msgspec.json.Decoder[Node] = msgspec.json.Decoder(Node)


def decode_tree(data: bytes | memoryview, *, payload: bool = False) -> Node:
    """The tree that `encode_tree` wrote.

    Args:
        payload: it is the payload of a `PerRank`: tensors stand in it by value.

    Raises:
        ManifestError: it is damaged or hostile.
    """
    try:
        tree = _DECODER.decode(data)
        refuse_duplicates(data, encode_tree(tree))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ManifestError(f"the state's structure cannot be read: {error}") from error
    check_tree(tree, payload=payload)
    return tree


def check_tree(tree: Node, *, payload: bool = False) -> None:
    """Refuses a tree that no state has.

    Raises:
        ManifestError: says where and what.
    """
    try:
        _check(tree, None, payload, 0)
    except RecursionError as error:
        raise ManifestError("the state's structure is nested too deeply for the stack that is left") from error


def _check(node: Node, name: str | None, payload: bool, depth: int, of_ranks: bool = False) -> None:
    """`of_ranks`: it belongs to some ranks only."""
    if isinstance(node, KeyedNode | SequenceNode | SetNode | FrozenSetNode | SliceNode | StatefulNode):
        depth += 1
    _require(depth <= MAX_DEPTH, name, f"more than {MAX_DEPTH} containers inside each other")
    if isinstance(node, KeyedNode):
        _check_keys(node, name)
        if isinstance(node, PartsNode):
            _require(not payload, name, "a tensor made of others inside of a payload")
            _check(node.context, name, True, depth)
            _require(is_plain(node.context), name, "a tensor where only plain values can be")
    elif isinstance(node, NamedTupleNode):
        fields = len(set(node.fields))
        _require(fields == len(node.fields) == len(node.v), name, "fields and values of a namedtuple differ in number")
    elif isinstance(node, DequeNode):
        _require(node.maxlen is None or len(node.v) <= node.maxlen, name, "a deque longer than its maxlen")
    elif isinstance(node, StatefulNode):
        _check(node.v, name, payload, depth, of_ranks)
    elif isinstance(node, RawNode):
        _require(payload, name, "a tensor by value outside of a payload")
        _check_raw(node, name)
    elif isinstance(node, TensorNode):
        _check_tensor(node, name, payload, of_ranks)
    elif isinstance(node, PerRankNode | BlobNode | RanksNode):
        _require(not payload, name, "a reference inside of a payload")
        if isinstance(node, RanksNode):
            _require(not of_ranks, name, "values of ranks inside each other")
            _check_ranks(node, name, depth)
    elif isinstance(node, SetNode | FrozenSetNode | SliceNode):
        for item in node.v:
            _check(item, name, payload, depth)
    for child_name, child in children(node, name):
        # Most leaves are themselves in JSON, and of those there may be very many.
        if type(child) is TensorNode:
            if payload or child.rank is not None:
                _check_tensor(child, child_name, payload, of_ranks)
        elif isinstance(child, msgspec.Struct):
            _check(child, child_name, payload, depth, of_ranks)


def _check_keys(node: KeyedNode, name: str | None) -> None:
    _require(len(node.k) == len(node.v), name, "keys and values differ in number")
    _require(len(set(node.k)) == len(node.k), name, "a key twice")
    for part in node.k:
        # The common key, a string in which nothing is escaped, needs no parsing.
        if "~" in part or "/" in part:
            parse_key(part)


def _check_raw(node: RawNode, name: str | None) -> None:
    try:
        itemsize = dtype_of(node.dtype).itemsize
    except UnsupportedDtypeError as error:
        raise ManifestError(f"{shown(name)}: {error}") from error
    _require(math.prod(node.shape) * itemsize == len(node.v), name, "a tensor whose bytes don't fit its shape")


def _check_ranks(node: RanksNode, name: str | None, depth: int) -> None:
    ranks = [rank for variant, _ in node.v for rank in variant]
    _require(all(variant for variant, _ in node.v), name, "a value of no rank")
    _require(len(set(ranks)) == len(ranks) and min(ranks) >= 0, name, "ranks that are negative or given twice")
    for _, variant_node in node.v:
        _check(variant_node, name, False, depth, True)


def _check_tensor(node: TensorNode, name: str | None, payload: bool, of_ranks: bool) -> None:
    _require(not payload, name, "a reference inside of a payload")
    _require(of_ranks or node.rank is None, name, "a rank's variant of a tensor where all ranks have one")


def _require(holds: bool, name: str | None, problem: str) -> None:
    if not holds:
        raise ManifestError(f"the state's structure is damaged at {shown(name)}: {problem}")
