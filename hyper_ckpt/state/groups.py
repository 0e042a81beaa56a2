"""Parameter groups of optimizers: options for parameters that are listed by name. They are joined, and found again, by
these names, for ranks list only the parameters that they have.

The rule. What stands under the key `param_groups` is taken for groups if it is a list of dicts in which `params` is a
list of strings. (An optimizer's own state_dict() lists numbers there: these mean nothing on another rank.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyper_ckpt.state.digests import canonical
from hyper_ckpt.state.names import join, shown
from hyper_ckpt.state.tree import (
    KeyedNode,
    ListNode,
    Node,
    SequenceNode,
    StatefulNode,
    children,
    encode_tree,
    has_blobs,
    has_only_leaves,
    is_plain,
    unwrap,
    with_items,
)

GROUPS, PARAMS = "param_groups", "params"
ADVICE = (
    "options that are kept for each parameter load into any groups: save what torch's get_state_dict gives with "
    "StateDictOptions(flatten_optimizer_state_dict=True)"
)


@dataclass(frozen=True)
class Unfit:
    """A group of the target for which the checkpoint has no options. `missing`: its parameters were not saved."""

    name: str
    text: str
    missing: bool


def groups_advice(name: str) -> str:
    """What to do where ranks hold groups that cannot be joined, in brackets; nothing for other names."""
    parts = name.split("/")
    is_list = parts[-1] == GROUPS or (parts[-1] == PARAMS and GROUPS in parts[-3:-2])
    return f" (groups that cannot be joined; {ADVICE})" if is_list else ""


def is_groups(node: Node, name: str | None) -> bool:
    """Whether a list is one of groups whose parameters are named."""
    if name is None or name.rpartition("/")[2] != GROUPS or not isinstance(node, ListNode):
        return False
    return bool(node.v) and all(map(_is_named, node.v))


def join_groups(lists: Sequence[Node]) -> Node | None:
    """One list of groups that has all parameters of several ranks' lists.

    Groups of the same place and options become one; others stand beside each other.

    Returns:
        None where all list the same parameters, or where they cannot be joined: a parameter has different options on
        two ranks, or groups whose places change hold tensors.
    """
    groups = [_groups(each) for each in lists]
    if all(_names(own) == _names(groups[0]) for own in groups) or any(has_blobs(encode_tree(each)) for each in lists):
        return None
    joined: dict[tuple[int, bytes], tuple[Node, dict[str, None]]] = {}
    for own in groups:
        for place, group in enumerate(own):
            joined.setdefault((place, _options(group)), (group, {}))[1].update(dict.fromkeys(_params(group)))
    in_order = [joined[key] for key in sorted(joined, key=lambda key: key[0])]
    named = [name for _, names in in_order for name in names]
    stay = len(in_order) == max(map(len, groups))
    if len(set(named)) < len(named) or not (stay or all(is_plain(group) for group, _ in in_order)):
        return None
    return ListNode(tuple(_with_params(group, ListNode(tuple(names))) for group, names in in_order))


def fit_groups(saved: Node, target: Node) -> tuple[Node, list[Unfit]]:
    """The saved tree with its groups as the target has them: each with the options that were saved for its parameters.
    Where there are none, with the target's own."""
    unfit: list[Unfit] = []
    return _fitted(saved, target, None, unfit), unfit


def _fitted(saved: Node, target: Node, name: str | None, unfit: list[Unfit]) -> Node:
    if isinstance(saved, StatefulNode):
        inner = _fitted(saved.v, target, name, unfit)
        return saved if inner is saved.v else StatefulNode(inner)
    target = unwrap(target)
    if is_groups(saved, name) and is_groups(target, name):
        same = _names(_groups(saved)) == _names(_groups(target))
        return saved if same else _regrouped(_groups(saved), _groups(target), name, unfit)
    if isinstance(saved, KeyedNode) and isinstance(target, KeyedNode) and not has_only_leaves(saved):
        wanted = dict(zip(target.k, target.v, strict=True))
        items = [
            _fitted(item, wanted[key], child_name, unfit) if key in wanted else item
            for key, (child_name, item) in zip(saved.k, children(saved, name), strict=True)
        ]
    elif isinstance(saved, ListNode) and isinstance(target, ListNode) and len(saved.v) == len(target.v):
        pairs = zip(children(saved, name), target.v, strict=True)
        items = [_fitted(item, other, child_name, unfit) for (child_name, item), other in pairs]
    else:
        return saved
    unchanged = all(new is old for new, old in zip(items, saved.v, strict=True))
    return saved if unchanged else with_items(saved, items)


def _regrouped(saved: Sequence[Node], target: Sequence[Node], name: str | None, unfit: list[Unfit]) -> Node:
    place_of = {param: place for place, group in enumerate(saved) for param in _params(group)}
    out: list[Node] = []
    for place, group in enumerate(target):
        at = join(name, str(place))
        absent = [param for param in _params(group) if param not in place_of]
        if absent:
            unfit.append(Unfit(at, f"{shown(at)}: {absent[0]!r} is in no group of the checkpoint; {ADVICE}", True))
        places = sorted({place_of[param] for param in _params(group) if param in place_of})
        found = [saved[each] for each in places]
        if len(set(map(_options, found))) > 1:
            text = f"{shown(at)}: its parameters were saved in groups {places}, which have different options; {ADVICE}"
            unfit.append(Unfit(at, text, False))
        elif found and places != [place] and not is_plain(found[0]):
            text = f"{shown(at)}: its parameters were saved in group {places[0]}, which holds tensors; {ADVICE}"
            unfit.append(Unfit(at, text, False))
        elif found:
            group = _with_params(found[0], _field(group))
        out.append(group)
    return ListNode(tuple(out))


def _groups(node: Node) -> tuple[Node, ...]:
    assert isinstance(node, SequenceNode)
    return node.v


def _names(groups: Sequence[Node]) -> list[list[str]]:
    return [_params(group) for group in groups]


def _field(group: Node) -> Node:
    """What stands under `params`."""
    assert isinstance(group, KeyedNode)
    return group.v[group.k.index(PARAMS)] if PARAMS in group.k else None


def _params(group: Node) -> list[str]:
    params = _field(group)
    assert isinstance(params, ListNode)
    return [each for each in params.v if isinstance(each, str)]


def _is_named(group: Node) -> bool:
    params = _field(group) if isinstance(group, KeyedNode) else None
    return isinstance(params, ListNode) and all(isinstance(each, str) for each in params.v)


def _options(group: Node) -> bytes:
    """What is the same for two groups whose options are."""
    return encode_tree(canonical(_with_params(group, None)))


def _with_params(group: Node, params: Node) -> Node:
    assert isinstance(group, KeyedNode)
    return with_items(group, [params if key == PARAMS else item for key, item in zip(group.k, group.v, strict=True)])
