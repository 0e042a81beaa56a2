"""Digests of fixed blocks, counted from the start of a piece."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from hyper_ckpt.receipt import BLOCK_BYTES

Digests = npt.NDArray[np.uint64]


def block_count(nbytes: int) -> int:
    """Blocks of a piece."""
    return -(-nbytes // BLOCK_BYTES)


block_digest = xxhash.xxh3_64_intdigest
"""xxh3-64 of one block, as a number. (No function of ours around it: it is called for every block.)"""


def to_hex(digests: Digests) -> str:
    """The digests as 16 hex digits each, joined."""
    return digests.astype(">u8").tobytes().hex()
