"""The objects in a state are asked for their own states, in an order that all ranks share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_ckpt.errors import UnsupportedStateError
from hyper_ckpt.state.classes import has_state, is_namedtuple, is_stateful, namespace_of
from hyper_ckpt.state.names import escape_keys, join_all, shown
from hyper_ckpt.state.tree import MAX_DEPTH
from hyper_ckpt.values import PerRank


@dataclass(frozen=True, eq=False)
class Substate:
    """An object that has state_dict and load_state_dict, and what its state_dict() gave."""

    object: Any
    state: Any


class Asker:
    """Calls state_dict() of objects, which may talk to other ranks there: in the order of names, inner objects next
    after the one in whose state they are. Dicts may have their keys in another order on each rank.

    Args:
        is_object: whether a value is stored as what its state_dict() gives; asked of those that have one.
        payloads: look into `PerRank`s, too.
    """

    def __init__(self, is_object: Callable[[Any], bool], payloads: bool) -> None:
        self._is_object, self._payloads = is_object, payloads
        self._around: set[int] = set()
        self.given: dict[str | None, Substate] = {}

    def ask(self, value: Any, name: str | None) -> None:
        """Asks all objects in a value."""
        for at, each in sorted(self._objects(value, name), key=lambda found: in_order(found[0])):
            self.given[at] = Substate(each, state_of(each, at))
            self.ask(self.given[at].state, at)

    def _objects(self, value: Any, name: str | None) -> Iterator[tuple[str | None, Any]]:
        """Objects in a value, not those inside their states. What goes too deep or in a circle is refused by others."""
        if isinstance(value, PerRank):
            value = value.value if self._payloads else None
        if has_state(type(value)) and is_stateful(value) and self._is_object(value):
            yield name, value
            return
        below = _below(value)
        if not below or id(value) in self._around or len(self._around) > MAX_DEPTH:
            return
        kinds = set(map(type, below))
        if not any(map(_may_hold, kinds)):
            return  # told by types, of which there are few where values are very many
        self._around.add(id(value))
        for at, item in zip(_names(value, name), below, strict=True):
            yield from self._objects(item, at)
        self._around.discard(id(value))


def state_of(value: Any, name: str | None) -> Any:
    """What an object's state_dict() gives.

    Raises:
        UnsupportedStateError: another such object.
    """
    state = value.state_dict()
    if is_stateful(state):
        raise UnsupportedStateError(f"{shown(name)}: state_dict() returned another object with a state_dict")
    return state


def in_order(name: str | None) -> list[str]:
    """The key by which names are sorted: what is inside something stands next to it."""
    return [] if name is None else name.split("/")


_HOLDERS = (Mapping, list, tuple, deque, PerRank)


def _may_hold(kind: type) -> bool:
    return issubclass(kind, _HOLDERS) or has_state(kind) or namespace_of(kind) is not None


def _below(value: Any) -> Collection[Any]:
    if namespace_of(type(value)) is not None:
        value = vars(value)
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | deque) else ()


def _names(value: Any, name: str | None) -> Sequence[str]:
    if namespace_of(type(value)) is not None:
        value = vars(value)
    if isinstance(value, Mapping):
        parts: Sequence[str] = escape_keys(value, name)
    else:
        parts = type(value)._fields if is_namedtuple(value) else [*map(str, range(len(value)))]
    return join_all(name, parts)
