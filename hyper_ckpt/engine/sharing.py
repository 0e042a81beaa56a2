"""Is it faster to read once and broadcast, or for every rank to read for itself? Measured, then reckoned."""

from __future__ import annotations

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
    buffer: ByteBuffer = np.zeros(nbytes, np.uint8)
    begin = time.perf_counter()
    try:
        store.read_into(file.name, [(at, nbytes)], [buffer.data])
    except Exception:  # the load itself will say what is wrong
        return 0, 0.0
    return nbytes, time.perf_counter() - begin


def broadcast_bandwidth(ranks: Ranks) -> float:
    """Bytes per second of a broadcast to all, as rank 0 sees it. Collective."""
    buffer: ByteBuffer = np.zeros(SAMPLE_BYTES, np.uint8)
    source = ranks.world_size - 1
    ranks.broadcast_into([buffer[:4096]], source).wait()
    begin = time.perf_counter()
    ranks.broadcast_into([buffer], source).wait()
    return SAMPLE_BYTES / max(time.perf_counter() - begin, 1e-9)


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
