"""Several kinds of tensors in one state: a framework's own, numpy arrays, and shards given by hand."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from hyper_ckpt.box import intersect, plain_ints
from hyper_ckpt.contracts.platform import (
    Carrier,
    HostTensor,
    LocalShard,
    TensorDescription,
    TensorParts,
    Tensors,
    sampled_fingerprint,
)
from hyper_ckpt.errors import UnsupportedLayoutError, UnsupportedStateError
from hyper_ckpt.layout import Boxes, Replicated
from hyper_ckpt.values import ShardedTensor


class CompositeTensors(Tensors):
    """Asks each of `parts` in turn, and describes a `ShardedTensor` over their tensors as boxes.

    Args:
        parts: the first makes new tensors where nothing says of which kind. Whether a part knows a value
            must depend on the value's type alone.
    """

    def __init__(self, parts: Sequence[Tensors]) -> None:
        self._parts = tuple(parts)
        self._part_of_type: dict[type, Tensors] = {}

    def describe(self, value: Any) -> TensorDescription | None:
        if isinstance(value, ShardedTensor):
            return self._describe_sharded(value)
        for part in self._parts:
            description = part.describe(value)
            if description is not None:
                self._part_of_type[type(value)] = part
                return description
        return None

    def may_have_parts(self, kind: type) -> bool:
        return any(part.may_have_parts(kind) for part in self._parts)

    def parts(self, value: Any) -> TensorParts | None:
        asked = (part.parts(value) for part in self._parts if part.may_have_parts(type(value)))
        return next(asked, None)

    def local_shards(self, value: Any) -> list[LocalShard]:
        if isinstance(value, ShardedTensor):
            return list(self._placed(value))
        return self._part(value).local_shards(value)

    def host_view(self, shard: LocalShard) -> Carrier | None:
        return self._part(shard.data).host_view(shard)

    def writable(self, shard: LocalShard) -> Carrier | None:
        return self._part(shard.data).writable(shard)

    def fingerprint(self, shards: Sequence[LocalShard]) -> bytes:
        return self._part(shards[0].data).fingerprint(shards) if shards else sampled_fingerprint([])

    def empty(self, description: TensorDescription, like: Any = None) -> Any:
        if like is None:
            return self._parts[0].empty(description)
        if not isinstance(like, ShardedTensor):
            return self._part(like).empty(description, like)
        shards = [(self._empty_shard(description, data), offsets) for data, offsets in like.shards]
        return ShardedTensor(shards, like.global_shape)

    def storage_key(self, shard: LocalShard) -> Hashable | None:
        return self._part(shard.data).storage_key(shard)

    def signature(self, value: Any) -> Hashable | None:
        part = self._part_of_type.get(type(value))
        return None if part is None else part.signature(value)

    def plain(self, value: Any) -> HostTensor | None:
        if type(value) not in self._part_of_type:  # whose it is only describing tells
            try:
                self.describe(value)
            except UnsupportedStateError:
                return None
        part = self._part_of_type.get(type(value))
        return None if part is None else part.plain(value)

    def cast(self, values: Carrier, dtype: str, to: str) -> Carrier:
        return self._parts[0].cast(values, dtype, to)

    def before_writes(self, values: Sequence[Any]) -> None:
        kinds = set(map(type, values))
        for part in self._parts:
            own = [kind for kind in kinds if self._part_of_type.get(kind) is part]  # hand-made shards are nobody's
            if own:
                part.before_writes([value for value in values if type(value) in own])

    def _part(self, value: Any) -> Tensors:
        known = self._part_of_type.get(type(value))
        if known is None and self.describe(value) is not None:
            known = self._part_of_type[type(value)]
        if known is None:
            raise UnsupportedStateError(f"{type(value).__qualname__} is not a tensor of this platform")
        return known

    def _empty_shard(self, description: TensorDescription, data: Any) -> Any:
        return self.empty(TensorDescription(description.dtype, tuple(data.shape), Replicated()), data)

    def _describe_sharded(self, value: ShardedTensor) -> TensorDescription:
        shape = _ints("global_shape", value.global_shape)
        if not value.shards:
            raise UnsupportedStateError(
                f"a ShardedTensor of shape {shape} without shards has no dtype: "
                "on ranks that hold nothing, give it one empty array of the right dtype"
            )
        inner = [self._describe_inner(data) for data, _ in value.shards]
        if len({(d.dtype, d.has_memory) for d in inner}) > 1 or len({self._part(data) for data, _ in value.shards}) > 1:
            raise UnsupportedStateError(
                f"the shards of a ShardedTensor of shape {shape} must be of one kind, dtype and device class, "
                f"not {sorted({d.dtype for d in inner})} in {sorted({type(s).__qualname__ for s, _ in value.shards})}"
            )
        pairs = zip(value.shards, inner, strict=True)
        boxes = tuple((_ints("offsets", offsets), d.shape) for (_, offsets), d in pairs if 0 not in d.shape)
        _check_boxes(shape, boxes)
        return TensorDescription(inner[0].dtype, shape, Boxes(boxes), inner[0].has_memory)

    def _describe_inner(self, data: Any) -> TensorDescription:
        description = None if isinstance(data, ShardedTensor) else self.describe(data)
        if description is None or not isinstance(description.layout, Replicated):
            raise UnsupportedStateError(
                f"a shard of a ShardedTensor must be a plain array or tensor, not {type(data).__qualname__}"
            )
        return description

    def _placed(self, value: ShardedTensor) -> Iterator[LocalShard]:
        for data, offsets in value.shards:
            (whole,) = self._part(data).local_shards(data)
            if 0 not in whole.sizes:
                yield LocalShard(plain_ints(offsets), whole.sizes, whole.data)


def _ints(what: str, values: Sequence[Any]) -> tuple[int, ...]:
    try:
        return plain_ints(values)
    except TypeError as error:
        raise UnsupportedLayoutError(f"{what} of a ShardedTensor must be integers, not {values!r}") from error


def _check_boxes(shape: tuple[int, ...], boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> None:
    """Refuses boxes that leave the tensor, and boxes of this rank that overlap."""
    for box_offsets, box_sizes in boxes:
        fits = len(box_offsets) == len(box_sizes) == len(shape) and all(
            o >= 0 and o + n <= length for o, n, length in zip(box_offsets, box_sizes, shape, strict=True)
        )
        if not fits:
            raise UnsupportedLayoutError(
                f"a shard of shape {box_sizes} at offsets {box_offsets} does not lie inside the global shape {shape}"
            )
    offsets = np.array([box[0] for box in boxes], np.int64).reshape(len(boxes), len(shape))
    sizes = np.array([box[1] for box in boxes], np.int64).reshape(len(boxes), len(shape))
    for i in range(len(boxes) - 1):
        common = intersect(offsets[i], sizes[i], offsets[i + 1 :], sizes[i + 1 :])[2]
        if common.any():
            other = boxes[i + 1 + int(common.argmax())]
            raise UnsupportedLayoutError(
                f"two shards of this rank overlap, (offsets, sizes) {boxes[i]} and {other}: give every element once"
            )
