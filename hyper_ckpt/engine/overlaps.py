"""Targets that share memory: they are filled only where the values that were saved for them agree there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, Carrier
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.engine.targets import Target
from hyper_ckpt.errors import TargetError
from hyper_ckpt.host_memory import address_of, region_of

WINDOW_BYTES = 8 << 20
"""Memory of which the saved values are compared at once."""

Ints = tuple[int, ...]
ReadBoxes = Callable[[Target, Sequence[tuple[Ints, Ints]]], list[Carrier]]
"""Reads boxes (offsets in the whole tensor, sizes) of what was saved for a target."""


class Place(NamedTuple):
    """Where the elements of a target lie: strides in bytes."""

    address: int
    sizes: Ints
    strides: Ints
    itemsize: int

    def region(self) -> tuple[int, int]:
        """The addresses between which they lie."""
        spans = [(n - 1) * step for n, step in zip(self.sizes, self.strides, strict=True)]
        low = self.address + sum([min(span, 0) for span in spans])
        return low, low + sum(map(abs, spans)) + self.itemsize

    def part(self, dim: int, low: int, length: int) -> Place:
        """Some elements along one dimension."""
        sizes = (*self.sizes[:dim], length, *self.sizes[dim + 1 :])
        return self._replace(address=self.address + low * self.strides[dim], sizes=sizes)

    def bytes_of(self, memory: ByteBuffer, origin: int) -> ByteBuffer:
        """The bytes of each element in a copy of the memory from address `origin` on."""
        shape, strides = (*self.sizes, self.itemsize), (*self.strides, 1)
        return np.ndarray(shape, np.uint8, memory, self.address - origin, strides)


def check_shared_memory(
    targets: Mapping[str, Sequence[Target]],
    ties: Mapping[str, str],
    alike: Mapping[str, str],
    read: ReadBoxes,
    limit: int,
) -> None:
    """Refuses targets that share memory, of several names or of one, if different bytes were saved for it: the value
    that is filled last would win. Memory outside the host is looked at only for `ties`.

    Args:
        ties: names that are the memory of another one.
        alike: those of them whose saved values are known to be equal.
        limit: bytes that may be held meanwhile, besides what reading takes.

    Raises:
        TargetError: names the targets.
    """
    for group in (*_overlapping(targets, alike), *_staged_ties(targets, ties, alike)):
        casts = [t.name for t in group if t.converts is not None]
        if casts:
            raise TargetError(
                f"{_names(group, ties)} share memory in the target, and {casts[0]!r} is to be cast: load into clones, "
                "or without cast"
            )
        _compare(group, ties, read, min(WINDOW_BYTES, max(limit // 8, 1 << 16)))


def _staged_ties(
    targets: Mapping[str, Sequence[Target]], ties: Mapping[str, str], alike: Mapping[str, str]
) -> Iterator[list[Target]]:
    for name, first in ties.items():
        if name not in alike and name in targets and first in targets:
            for one, other in zip(targets[first], targets[name], strict=True):
                if one.memory is None and one.converts is None and one.nbytes:
                    yield [one, other]


def _overlapping(targets: Mapping[str, Sequence[Target]], alike: Mapping[str, str]) -> list[list[Target]]:
    """Groups of targets in host memory, each of which shares elements with another one of its group."""
    filled = [
        t for own in targets.values() for t in own if t.nbytes and (t.memory is not None or t.converts is not None)
    ]
    regions = np.fromiter(itertools.chain.from_iterable(map(_region, filled)), np.int64)
    lows, highs = regions.reshape(-1, 2).T
    order = np.lexsort((highs, lows))
    if (highs[order[:-1]] <= lows[order[1:]]).all():
        return []
    reach: list[tuple[int, int]] = []  # regions that may go on, with the number of the target
    group_of = [*range(len(filled))]
    for i in order.tolist():
        low, target = int(lows[i]), filled[i]
        reach = [r for r in reach if r[0] > low]
        for _, j in reach:
            other = filled[j]
            # Tied names may both be here: then each box of one is the same box of the other.
            same = alike.get(other.name, other.name) == alike.get(target.name, target.name)
            if not (same and other.offsets == target.offsets) and _share(_view(other), _view(target)):
                old, new = group_of[i], group_of[j]
                group_of = [new if g == old else g for g in group_of]
        reach.append((int(highs[i]), i))
    groups: dict[int, list[Target]] = {}
    for target, number in zip(filled, group_of, strict=True):
        groups.setdefault(number, []).append(target)
    return [group for group in groups.values() if len(group) > 1]


def _compare(group: Sequence[Target], ties: Mapping[str, str], read: ReadBoxes, window: int) -> None:
    """Lays what was saved into a copy of the memory, window by window, and looks whether other bytes lie there."""
    places = [_place(target) for target in group]
    regions = [place.region() for place in places]
    slab = window // 4
    first, end = min(low for low, _ in regions), max(high for _, high in regions)
    for base in range(first, end, window):
        inside = [i for i, (low, high) in enumerate(regions) if low < base + window and high > base]
        if len(inside) < 2:
            continue
        origin, room = base - slab, min(window, end - base) + 2 * slab
        memory, known = np.zeros(room, np.uint8), np.zeros(room, np.bool_)
        for i in inside:
            target = group[i]
            parts = [*_parts(places[i], target.offsets, base, base + window, slab)]
            arrays = read(target, [(offsets, part.sizes) for offsets, part in parts])
            for (_, part), array in zip(parts, arrays, strict=True):
                data = array.reshape(-1).view(np.uint8).reshape(*part.sizes, part.itemsize)
                there, seen = part.bytes_of(memory, origin), part.bytes_of(known.view(np.uint8), origin)
                if ((there != data) & (seen != 0)).any():
                    raise _disagreement([group[j] for j in inside], target, ties)
                there[...], seen[...] = data, 1


def _parts(place: Place, offsets: Ints, low: int, high: int, most: int) -> Iterator[tuple[Ints, Place]]:
    """Parts of a target that reach into some memory, with their offsets, each spanning at most `most` bytes."""
    begin, end = place.region()
    if end <= low or begin >= high:
        return
    if end - begin <= most or all(n == 1 for n in place.sizes):
        yield offsets, place
        return
    dim = max(range(len(place.sizes)), key=lambda d: (place.sizes[d] - 1) * abs(place.strides[d]))
    half = place.sizes[dim] // 2
    for at, length in ((0, half), (half, place.sizes[dim] - half)):
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        yield from _parts(place.part(dim, at, length), moved, low, high, most)


def _place(target: Target) -> Place:
    itemsize = dtype_of(target.dtype).itemsize
    if isinstance(target.memory, np.ndarray):
        return Place(address_of(target.memory), target.sizes, target.memory.strides, itemsize)
    strides = tuple(itemsize * math.prod(target.sizes[d + 1 :]) for d in range(len(target.sizes)))
    # Outside host memory only ties are compared, and of these each lies as the other.
    return Place(target.memory or 0, target.sizes, strides, itemsize)


def _region(target: Target) -> tuple[int, int]:
    """The addresses between which a target lies."""
    memory = target.memory
    return (memory, memory + target.nbytes) if isinstance(memory, int) else region_of(_view(target))


def _view(target: Target) -> Carrier:
    return target.view if target.converts is None else target.converts


def _share(one: Carrier, other: Carrier) -> bool:
    try:
        return np.shares_memory(one, other, max_work=10_000)
    except np.exceptions.TooHardError:  # interleaved views of some kind: the comparison tells
        return True


def _names(group: Sequence[Target], ties: Mapping[str, str]) -> str:
    names = sorted({t.name for t in group}, key=lambda name: (name not in ties, name))
    if len(names) == 1:
        return f"two shards of {names[0]!r}"
    shown = [*map(repr, names[:4])]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _disagreement(group: Sequence[Target], target: Target, ties: Mapping[str, str]) -> TargetError:
    if all(ties.get(t.name, t.name) == ties.get(target.name, target.name) for t in group) and target.name in ties:
        return TargetError(
            f"{_names(group, ties)} are one tensor in the target, but two values were saved for them: untie them, or "
            "load only one of them"
        )
    return TargetError(
        f"{_names(group, ties)} share memory in the target, but different values were saved for it: load into clones, "
        "or only one of them"
    )
