"""Plans of earlier saves: a second save of the same structure plans nothing.

Planners are pure, so that equal inputs have equal plans; which world it is, with every dtype, shape, layout and name
in it, is told by its key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hyper_ckpt.api.common import kept
from hyper_ckpt.columns import Columns
from hyper_ckpt.contracts.planner import SavePlanner
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.description import World
from hyper_ckpt.latest import Latest


class Plans:
    """The plans that a platform's ranks made lately."""

    def __init__(self) -> None:
        self._plans: Latest[object, Columns] = Latest()
        self._memos: Latest[bytes, dict[object, Any]] = Latest()
        self.made = 0

    def known(self, world: World) -> World:
        """The same world, with what was worked out of earlier ones of its key."""
        return dataclasses.replace(world, memo=self._memos.of(world.key, dict))

    def get(self, planner: SavePlanner, world: World, rank: int | None, make: Callable[[], Columns]) -> Columns:
        """The plan of one rank, or of all (None): an earlier one, or a new one."""
        load = b"" if world.base_load is None else world.base_load.tobytes()
        key = (type(planner), planner.identity(), world.world_size, world.key, load, rank)

        def counted() -> Columns:
            self.made += 1
            return make()

        return self._plans.of(key, counted)


def plans_of(platform: Platform) -> Plans:
    """The plans that belong to a platform."""
    return kept(platform, "plans", Plans)
