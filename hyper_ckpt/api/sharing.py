"""What the ranks of a load decide and read together: whether they share reads at all, and large plain values."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hyper_ckpt.agreement import Operation, broadcast_sized
from hyper_ckpt.api.common import attempt, kept
from hyper_ckpt.api.matching import Match
from hyper_ckpt.contracts.platform import Platform, Ranks
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.engine.sharing import SMALL_BYTES, Sample, broadcast_bandwidth, is_worth_it, read_sample
from hyper_ckpt.engine.stored import Stored
from hyper_ckpt.errors import ManifestError
from hyper_ckpt.receipt import FileRecord
from hyper_ckpt.state.walk import blobs


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


def pass_on_blobs(operation: Operation, ranks: Ranks, stored: Stored, match: Match) -> None:
    """Large plain values that all ranks want: each is read by one rank, in turn, and broadcast. Collective."""
    wanted = {(name, node.rank or 0, node.size) for name, node in blobs(match.saved) if name in match.own}
    data = operation.agree("choosing how to read values", msgspec.msgpack.encode(sorted(wanted)), decide=_wanted_by_all)
    common = msgspec.msgpack.decode(data, type=list[tuple[str, int, int]])
    if not common:
        return
    reader_of = [number % ranks.world_size for number in range(len(common))]

    def read() -> None:
        for (name, owner, size), reader in zip(common, reader_of, strict=True):
            blob = stored.payload(owner, name) if reader == ranks.rank else None
            if reader == ranks.rank and (blob is None or len(blob) != size):
                raise ManifestError(f"the value of {name!r} is missing from the receipt of rank {owner}")

    def broadcast() -> None:
        for (name, owner, size), reader in zip(common, reader_of, strict=True):
            own = (stored.payload(owner, name) if reader == ranks.rank else None) or b""
            stored.keep_payload(owner, name, broadcast_sized(ranks, reader, own, size).tobytes())

    # Nobody makes room for a size before the reader has seen that it is true.
    _, error = attempt(read)
    operation.agree("reading values", error=error)
    _, error = attempt(broadcast)
    operation.agree("passing on values", error=error)


def _wanted_by_all(votes: list[bytes]) -> bytes:
    wanted = [set(msgspec.msgpack.decode(vote, type=list[tuple[str, int, int]])) for vote in votes]
    return msgspec.msgpack.encode(sorted(set.intersection(*wanted)))
