"""Text to train on that every machine has: the source of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
from mindspore.dataset import NumpySlicesDataset
from network import CONTEXT

ROWS = 64  # of a batch, all ranks together


def standard_library() -> np.ndarray:
    """The modules at the top of the standard library, one after the other, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def passages(first: int, end: int) -> np.ndarray:
    """(steps, ROWS, CONTEXT + 1) bytes for the steps `first` to `end` of the training, whoever asks and when."""
    text = standard_library()
    starts = np.stack(
        [np.random.default_rng(step).integers(len(text) - CONTEXT, size=ROWS) for step in range(first, end)]
    )
    return text[starts[..., None] + np.arange(CONTEXT + 1)].astype(np.int32)


def batches(first: int, end: int, rank: int, world_size: int) -> NumpySlicesDataset:
    """This rank's rows, one batch a step: a training that goes on gets the batches that it has not had yet."""
    mine = passages(first, end)[:, rank::world_size]
    return NumpySlicesDataset(
        (mine[..., :-1], mine[..., -1]), ["context", "next"], num_parallel_workers=1, shuffle=False
    )
