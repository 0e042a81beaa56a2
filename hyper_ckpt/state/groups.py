"""Parameter groups of optimizers: options for parameters that are listed by name. They are joined, and found again, by
these names, for ranks list only the parameters that they have.

The rule. What stands under the key `param_groups` is taken for groups if it is a list of dicts in which `params` is a
list of strings. (An optimizer's own state_dict() lists numbers there: these mean nothing on another rank.) What stands
beside it under `state` is then by these names, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hyper_ckpt.state.compare import leaves
from hyper_ckpt.state.digests import canonical
from hyper_ckpt.state.names import join, parse_key, shown
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

GROUPS, PARAMS, STATE = "param_groups", "params", "state"
ADVICE = (
    "make the optimizer with the groups that were saved; or save what torch's get_state_dict gives with "
    "StateDictOptions(flatten_optimizer_state_dict=True), which keeps options for each parameter"
)


@dataclass(frozen=True)
class Unfit:
    """A group of the target for which the checkpoint has no options. `missing`: its parameters were not saved."""

    name: str
    text: str
    missing: bool


@dataclass(frozen=True)
class Fitted:
    """A saved tree as a target takes it: `unfit` are groups for which nothing was saved, `unwanted` names of what was
    saved for parameters that the target does not have. Other stages of a pipeline may."""

    tree: Node
    unfit: tuple[Unfit, ...]
    unwanted: tuple[str, ...]


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


def fit_groups(saved: Node, target: Node) -> Fitted:
    """The saved tree with its groups as the target has them: each with the options that were saved for its parameters,
    where there are none with the target's own. Beside them, the states of these parameters alone."""
    fitter = _Fitter()
    tree = fitter.fit(saved, target, None)
    return Fitted(tree, tuple(fitter.unfit), tuple(fitter.unwanted))


@dataclass
class _Fitter:
    unfit: list[Unfit] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)

    def fit(self, saved: Node, target: Node, name: str | None) -> Node:
        if isinstance(saved, StatefulNode):
            inner = self.fit(saved.v, target, name)
            return saved if inner is saved.v else StatefulNode(inner)
        target = unwrap(target)
        if is_groups(saved, name) and is_groups(target, name):
            same = _names(_groups(saved)) == _names(_groups(target))
            return saved if same else _regrouped(_groups(saved), _groups(target), name, self.unfit)
        if isinstance(saved, KeyedNode) and isinstance(target, KeyedNode) and not has_only_leaves(saved):
            items = self._fit_items(saved, target, name)
        elif isinstance(saved, ListNode) and isinstance(target, ListNode) and len(saved.v) == len(target.v):
            pairs = zip(children(saved, name), target.v, strict=True)
            items = [self.fit(item, other, child_name) for (child_name, item), other in pairs]
        else:
            return saved
        unchanged = all(new is old for new, old in zip(items, saved.v, strict=True))
        return saved if unchanged else with_items(saved, items)

    def _fit_items(self, saved: KeyedNode, target: KeyedNode, name: str | None) -> list[Node]:
        known, wanted = dict(zip(saved.k, saved.v, strict=True)), dict(zip(target.k, target.v, strict=True))
        states, groups = known.get(STATE), (known.get(GROUPS), wanted.get(GROUPS))
        if states is not None and all(is_groups(each, join(name, GROUPS)) for each in groups):
            known[STATE] = self._own_states(states, *groups, join(name, STATE))
        return [self.fit(item, wanted[key], join(name, key)) if key in wanted else item for key, item in known.items()]

    def _own_states(self, states: Node, saved: Node, target: Node, name: str) -> Node:
        """The states without those of parameters that only the saved groups have."""
        gone = {param for group in _groups(saved) for param in _params(group)}
        gone -= {param for group in _groups(target) for param in _params(group)}
        if not gone or not isinstance(states, KeyedNode):
            return states
        kept: dict[str, Node] = {}
        for key, (child_name, item) in zip(states.k, children(states, name), strict=True):
            if parse_key(key) in gone:
                self.unwanted += leaves(item, child_name)
            else:
                kept[key] = item
        return with_items(states, kept.values(), tuple(kept))


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
