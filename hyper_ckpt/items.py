"""What planners list one by one, in the words that users of torch's distributed checkpoint know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hyper_ckpt.box import ints_if_all
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.metadata import MetadataIndex


@dataclass(frozen=True)
class WriteItem:
    """A box of a tensor that a rank holds and may write.

    Args:
        index: the tensor's name in `fqn`, the box's begin in `offset`, in elements of the whole tensor.
        sizes: of the box, in elements.
        dtype: name of the tensor's dtype.
    """

    index: MetadataIndex
    sizes: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", ints_if_all(self.sizes))

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.sizes) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class ReadItem:
    """A box of a target that is to be filled.

    Args:
        index, sizes: as in `WriteItem`.
        reader: the rank that reads it for all `sharers`; None: each rank that lists the item reads for itself.
        sharers: the ranks that it is broadcast to, sorted, the reader included. Each must list this same item.
    """

    index: MetadataIndex
    sizes: tuple[int, ...]
    reader: int | None = None
    sharers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", ints_if_all(self.sizes))
        object.__setattr__(self, "reader", None if self.reader is None else ints_if_all((self.reader,))[0])
        object.__setattr__(self, "sharers", ints_if_all(self.sharers))


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes."""

    items: Sequence[WriteItem] = field(default=())


@dataclass(frozen=True)
class LoadPlan:
    """What one rank fills."""

    items: Sequence[ReadItem] = field(default=())
