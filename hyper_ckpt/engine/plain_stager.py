"""Staging where nothing lies on a device."""

from __future__ import annotations

import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, LocalShard, Pending, Stager
from hyper_ckpt.errors import PlanError


class PlainStager(Stager):
    """Plain memory for what is read or copied on the way; there are no shards to stage."""

    def buffer(self, nbytes: int) -> ByteBuffer:
        return np.empty(nbytes, np.uint8)

    def release(self, buffer: ByteBuffer) -> None:
        return None

    def copy_out(self, shard: LocalShard, buffer: ByteBuffer) -> Pending:
        raise PlanError("a shard was to be staged where none can be")

    def copy_in(self, buffer: ByteBuffer, shard: LocalShard) -> Pending:
        raise PlanError("a shard was to be staged where none can be")
