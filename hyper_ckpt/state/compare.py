"""How the state that a load fills differs from the state that was saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from hyper_ckpt.state.names import shown
from hyper_ckpt.state.parts import differing_parts
from hyper_ckpt.state.tree import (
    KeyedNode,
    NamedTupleNode,
    Node,
    PartsNode,
    PerRankNode,
    SequenceNode,
    TensorNode,
    children,
    count_of,
    kind_of,
    resolved,
    unwrap,
)


@dataclass(frozen=True)
class Difference:
    """One place where target and checkpoint differ.

    "missing": the target wants it and it was not saved; "unexpected": saved, but not wanted; "container":
    both have something there, of kinds or lengths that don't fit. `text` says it in words.
    """

    kind: Literal["missing", "unexpected", "container"]
    name: str
    text: str


def compare(target: Node, saved: Node) -> list[Difference]:
    """All differences between the tree of a target and one rank's saved tree, in the target's order.

    Values fit whatever they are: the saved one will replace the target's. Dicts of all kinds fit each other, the
    target's own stays. An object with a state_dict is compared as what its state_dict() gave; see `adopt` for those
    that take what was saved. Of a subtree that only one side has, every leaf is listed; an empty container and a list
    of nothing but scalars are one leaf each.
    """
    return list(_differences(target, saved, None))


def _differences(target: Node, saved: Node, name: str | None) -> Iterator[Difference]:
    target, saved = unwrap(target), resolved(unwrap(saved))
    problem = _misfit(target, saved)
    if problem is not None:
        yield Difference("container", "" if name is None else name, f"{shown(name)}: {problem}")
    elif isinstance(target, KeyedNode) and isinstance(saved, KeyedNode):
        yield from _key_differences(target, saved, name)
    elif isinstance(target, SequenceNode) and isinstance(saved, SequenceNode):
        pairs = zip(children(target, name), saved.v, strict=True)
        for (child_name, item), saved_item in pairs:
            if isinstance(item, msgspec.Struct) or isinstance(saved_item, msgspec.Struct):
                yield from _differences(item, saved_item, child_name)


def _key_differences(target: KeyedNode, saved: KeyedNode, name: str | None) -> Iterator[Difference]:
    if target == saved:  # told without a step of Python, and often so
        return
    saved_items = dict(zip(saved.k, saved.v, strict=True))
    for key, (child_name, item) in zip(target.k, children(target, name), strict=True):
        if key not in saved_items:
            for leaf in leaves(item, child_name):
                yield Difference("missing", leaf, f"{shown(leaf)} is not in the checkpoint")
            continue
        saved_item = saved_items.pop(key)
        # Two scalars always fit, and of these there may be very many.
        if isinstance(item, msgspec.Struct) or isinstance(saved_item, msgspec.Struct):
            yield from _differences(item, saved_item, child_name)
    for key, (child_name, item) in zip(saved.k, children(saved, name), strict=True):
        if key in saved_items:
            for leaf in leaves(item, child_name):
                yield Difference("unexpected", leaf, f"{shown(leaf)} is in the checkpoint, but not in the target")


def leaves(node: Node, name: str) -> Iterator[str]:
    """Names of the leaves of a subtree: tensors, payloads, values, empty containers, lists of scalars."""
    inner = unwrap(node)
    has_leaves = bool(inner.v) if isinstance(inner, KeyedNode) else not _is_value(inner)
    if has_leaves:
        for child_name, child in children(inner, name):
            yield from leaves(child, child_name)
    else:
        yield name


def _is_value(node: Node) -> bool:
    holders = KeyedNode | SequenceNode | TensorNode | PerRankNode
    return not isinstance(node, SequenceNode) or not any(isinstance(unwrap(item), holders) for item in node.v)


def _misfit(target: Node, saved: Node) -> str | None:
    """Why one can't be loaded into the other, in words; None if it can."""
    if isinstance(target, PartsNode) and isinstance(saved, PartsNode):
        found = differing_parts(target, saved)
        return None if found is None else f"the target and the checkpoint have tensors of different kinds: {found}"
    if isinstance(target, PartsNode):  # the other way round the target is a dict of the parts, to be filled by hand
        return _unlike(target, saved)
    for special in (TensorNode, PerRankNode):
        if isinstance(target, special) or isinstance(saved, special):
            fits = isinstance(target, special) and isinstance(saved, special)
            return None if fits else _unlike(target, saved)
    if isinstance(target, KeyedNode) and isinstance(saved, KeyedNode):
        return None
    if kind_of(target) != kind_of(saved):
        return _unlike(target, saved)
    if count_of(target) != count_of(saved):
        text = f"the target has {count_of(target)} items, the checkpoint {count_of(saved)}"
        return f"{text}: an object with state_dict and load_state_dict takes any number"
    if isinstance(target, NamedTupleNode) and isinstance(saved, NamedTupleNode) and target.fields != saved.fields:
        return f"the target has the fields {', '.join(target.fields)}, the checkpoint {', '.join(saved.fields)}"
    return None


def _unlike(target: Node, saved: Node) -> str:
    return f"the target has {_described(target)}, the checkpoint {_described(saved)}"


def _described(node: Node) -> str:
    if isinstance(node, TensorNode):
        return "a tensor"
    if isinstance(node, PerRankNode):
        return "a PerRank"
    if isinstance(node, PartsNode):
        return f"a tensor of class {node.kind}"
    kind = kind_of(node)
    return "a plain value" if kind is None else f"a {'collections.OrderedDict' if kind == 'odict' else kind}"
