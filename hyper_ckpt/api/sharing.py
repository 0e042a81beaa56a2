"""Whether the ranks of a load share their reads, where that is left to us: measured together, decided by rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hyper_ckpt.agreement import Operation
from hyper_ckpt.api.common import attempt, kept
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.engine.sharing import SMALL_BYTES, Sample, broadcast_bandwidth, is_worth_it, read_sample
from hyper_ckpt.receipt import FileRecord


def choose_sharing(
    operation: Operation, platform: Platform, store: ByteStore, files: Sequence[FileRecord], wanted: int, whole: int
) -> bool:
    """What is likely to be faster; the same on all ranks. Collective.

    Args:
        files: of which a sample is read.
        wanted: bytes of this rank's boxes.
        whole: bytes of the tensors that they are parts of.
    """
    most = operation.agree("choosing how to read", wanted.to_bytes(16, "big"), decide=max)
    if int.from_bytes(most, "big") < SMALL_BYTES:
        return True

    def bandwidth_of_ranks() -> float:
        stated = platform.ranks.broadcast_bandwidth
        return broadcast_bandwidth(platform.ranks) if stated is None else stated

    def measure() -> Sample:
        bandwidth = kept(platform, "broadcast bandwidth", bandwidth_of_ranks)
        # All at the same time: they may share what bandwidth there is.
        nbytes, seconds = read_sample(store, files, platform.ranks.rank)
        return Sample(wanted, whole, nbytes, seconds, bandwidth)

    sample, error = attempt(measure)
    own = msgspec.msgpack.encode(sample) if sample else b""
    return bool(operation.agree("measuring how to read", own, error, _decide))


def _decide(votes: list[bytes]) -> bytes:
    return b"1" if is_worth_it([msgspec.msgpack.decode(vote, type=Sample) for vote in votes]) else b""
