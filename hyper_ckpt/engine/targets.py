"""What a load fills: boxes of this rank."""

from __future__ import annotations

from typing import Any

import msgspec

from hyper_ckpt.contracts.platform import ByteBuffer, Carrier
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.host_memory import array_at


class Target(msgspec.Struct, eq=False, gc=False):
    """A box to fill, of what this rank holds of a tensor.

    Args:
        memory: where it lies: an array, or the address of a plain tensor; None where `shard` is copied into.
        shard: the platform's LocalShard; a plain tensor needs none.
        converts: the host memory that `shard` is, where its values are converted on their way in.
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
    converts: Carrier | None = None
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
