"""Cells in a state: networks and optimizers, which have all their tensors from the beginning."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mindspore import nn

from hyper_ckpt.contracts.objects import Objects


class MindSporeObjects(Objects):
    """What was saved must fit a Cell as it is; any other object takes it as it was saved."""

    def fixed(self, owner: Any, state: Any) -> Collection[Any] | None:
        return state.keys() if isinstance(owner, nn.Cell) and isinstance(state, dict) else None
