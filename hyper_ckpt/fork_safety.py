"""What a forked child must not inherit: locks that nobody will release, and threads that are not there."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgetful(Protocol):
    """Something with locks or threads."""

    def reset_after_fork(self) -> None:
        """Called in a forked child, before anything else runs there."""


_ALIVE: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def reset_in_children(thing: Forgetful) -> None:
    """Has `thing.reset_after_fork` called in every forked child, while `thing` lives."""
    _ALIVE.add(thing)


def _reset_all() -> None:
    for thing in list(_ALIVE):
        thing.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
