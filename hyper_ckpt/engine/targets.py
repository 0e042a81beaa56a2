"""What a load fills: boxes of this rank, and whether they can all be filled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, Carrier
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.errors import TargetError
from hyper_ckpt.host_memory import array_at, region_of


class Target(msgspec.Struct, eq=False, gc=False):
    """A box to fill, of what this rank holds of a tensor.

    Args:
        memory: where it lies: an array, or the address of a plain tensor; None where `shard` is copied into.
        shard: the platform's LocalShard; a plain tensor needs none.
        room: the bytes of the buffer that it takes to copy into `shard`.
        staging: the buffer that `memory` shows meanwhile.
        remaining: boxes that are still to be filled.
        keeps: not all of it is filled while its buffer is held, so that what it has must be copied out first.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    nbytes: int
    memory: Carrier | int | None
    shard: Any = None
    room: int = 0
    staging: ByteBuffer | None = None
    remaining: int = 0
    keeps: bool = False

    @property
    def staged(self) -> bool:
        """Whether it is filled through a host buffer."""
        return self.memory is None or self.staging is not None

    @property
    def view(self) -> Carrier:
        """Its memory as an array."""
        if isinstance(self.memory, int):
            self.memory = array_at(self.memory, self.nbytes, self.sizes, dtype_of(self.dtype).carrier)
        assert self.memory is not None
        return self.memory


def refuse_shared_memory(targets: Mapping[str, Sequence[Target]], ties: Mapping[str, str]) -> None:
    """Refuses targets that share elements, of several names or of one: the value that is filled last would win.

    Args:
        ties: names that are the memory of another and have the same saved value.

    Raises:
        TargetError: names two of them.
    """
    filled = [t for own in targets.values() for t in own if t.memory is not None and t.nbytes]
    regions = np.fromiter(itertools.chain.from_iterable(map(_region, filled)), np.int64)
    lows, highs = regions.reshape(-1, 2).T
    order = np.lexsort((highs, lows))
    if (highs[order[:-1]] <= lows[order[1:]]).all():
        return
    reach: list[tuple[int, Target]] = []  # regions that may go on
    for i in order.tolist():
        low, high, target = int(lows[i]), int(highs[i]), filled[i]
        reach = [r for r in reach if r[0] > low]
        for _, other in reach:
            names = [ties.get(t.name, t.name) for t in (other, target)]
            # Tied names may both be here: then each box of one is the same box of the other.
            tied = names[0] == names[1] and other.offsets == target.offsets
            if not tied and _overlap(other.view, target.view):
                what = f"{names[0]!r} and {names[1]!r}" if names[0] != names[1] else f"two shards of {names[0]!r}"
                raise TargetError(
                    f"{what} share memory in the target, but each was saved by itself: load into clones, or only one "
                    "of them"
                )
        reach.append((high, target))


def _region(target: Target) -> tuple[int, int]:
    """The addresses between which a target lies."""
    memory = target.memory
    return (memory, memory + target.nbytes) if isinstance(memory, int) else region_of(target.view)


def _overlap(one: Carrier, other: Carrier) -> bool:
    try:
        return np.shares_memory(one, other, max_work=10_000)
    except np.exceptions.TooHardError:  # not to be told in reasonable time: interleaved views of some kind
        return False
