"""Values that users put into a state to say how a leaf is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class PerRank:
    """A value that belongs to the rank, not to the job: random states, loader positions, timings.

    Every rank's value is saved, whatever the others hold. A load gives rank r what rank r saved
    and sets it as `value`; a rank that did not exist then keeps its own, and the report names it.

    Args:
        value: any nested state without distributed tensors. It is stored whole, per rank: keep it small.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """A tensor of which this rank holds some boxes, for jobs that shard by hand.

    Args:
        shards: (array, offsets) pairs. Arrays are numpy arrays or tensors of the platform; offsets count elements of
            the global tensor, in whatever integers. An array may be empty: its shape and offsets do not matter then.
        global_shape: shape of the whole tensor.
    """

    shards: Sequence[tuple[Any, tuple[int, ...]]]
    global_shape: tuple[int, ...]
