"""Is it faster to read once and broadcast, or for every rank to read for itself? Measured, then reckoned."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from hyper_ckpt.contracts.platform import ByteBuffer, Ranks
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.receipt import FileRecord

SAMPLE_BYTES = 4 << 20
SMALL_BYTES = 8 << 20
"""Loads of less per rank are not worth a measurement: they read once, which spares the store."""


_TRIES = 3
_ENOUGH_SECONDS = 0.005


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """What a rank knows: bytes of its own boxes, bytes of the whole tensors, and how fast it read a sample."""

    wanted: int
    whole: int
    nbytes: int
    seconds: float
    broadcast: float


def read_sample(store: ByteStore, files: Sequence[FileRecord], rank: int) -> tuple[int, float]:
    """Reads a little of a data file while the other ranks do the same. Returns bytes and seconds; zeros if it fails."""
    if not files:
        return 0, 0.0
    file = files[rank % len(files)]
    room = file.size - file.data_start
    nbytes = min(room, SAMPLE_BYTES)
    at = file.data_start + (rank * SAMPLE_BYTES) % max(room - nbytes + 1, 1)
    buffer, taken = _touched(nbytes), list[float]()
    try:
        # One read of a fast store may have been disturbed; what takes long says enough.
        while len(taken) < _TRIES and sum(taken) < _ENOUGH_SECONDS:
            begin = time.perf_counter()
            store.read_into(file.name, [(at, nbytes)], [buffer.data])
            taken.append(time.perf_counter() - begin)
    except Exception:  # the load itself will say what is wrong
        return 0, 0.0
    return nbytes, min(taken)


def broadcast_bandwidth(ranks: Ranks) -> float:
    """Bytes per second of a broadcast to all, as rank 0 sees it. Collective."""
    buffer, taken, source = _touched(SAMPLE_BYTES), list[float](), ranks.world_size - 1
    ranks.broadcast_into([buffer[:4096]], source).wait()
    for _ in range(_TRIES):  # what is kept for long must not be one that was disturbed
        begin = time.perf_counter()
        ranks.broadcast_into([buffer], source).wait()
        taken.append(time.perf_counter() - begin)
    return SAMPLE_BYTES / max(statistics.median(taken), 1e-9)


def _touched(nbytes: int) -> ByteBuffer:
    """Memory that was written to: the first write to a page costs more than the bytes."""
    return np.full(nbytes, 1, np.uint8)


def is_worth_it(samples: Sequence[Sample]) -> bool:
    """Whether reading once is likely to be faster, for the rank that is slowest."""
    nbytes, seconds = sum(s.nbytes for s in samples), max(s.seconds for s in samples)
    wanted = sum(s.wanted for s in samples)
    if not nbytes or not seconds or not wanted:
        return True
    bandwidth = nbytes / seconds  # of all ranks together
    # No more than all that is wanted, nor than the tensors have.
    once = min(wanted, max(s.whole for s in samples))
    return once / bandwidth + max(s.wanted for s in samples) / samples[0].broadcast < wanted / bandwidth
