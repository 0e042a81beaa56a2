"""Plans of earlier saves: a second save of the same structure plans nothing.

Planners are pure, so that equal inputs have equal plans; which world it is, with every dtype, shape, layout and name
in it, is told by its key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from hyper_ckpt.api.common import kept
from hyper_ckpt.columns import Columns
from hyper_ckpt.contracts.planner import SavePlanner
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.description import World

_MOST = 8


class Plans:
    """The plans that a platform's ranks made lately."""

    def __init__(self) -> None:
        self._plans: OrderedDict[object, Columns] = OrderedDict()
        self.made = 0

    def get(self, planner: SavePlanner, world: World, rank: int | None, make: Callable[[], Columns]) -> Columns:
        """The plan of one rank, or of all (None): an earlier one, or a new one."""
        load = b"" if world.base_load is None else world.base_load.tobytes()
        key = (type(planner), planner.identity(), world.world_size, world.key, load, rank)
        if key not in self._plans:
            self._plans[key] = make()
            self.made += 1
        self._plans.move_to_end(key)
        while len(self._plans) > _MOST:
            self._plans.popitem(last=False)
        return self._plans[key]


def plans_of(platform: Platform) -> Plans:
    """The plans that belong to a platform."""
    return kept(platform, "plans", Plans)
