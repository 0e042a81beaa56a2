"""The states of the golden checkpoints. What is stored must be read by every later release."""

from __future__ import annotations

import datetime
from collections import OrderedDict, namedtuple
from pathlib import PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

import hyper_ckpt

Point = namedtuple("Point", "x y")


def version_1(rank: int) -> dict[Any, Any]:
    """Saved by 2 ranks: grids, explicit columns, ties, values of every kind, payloads."""
    weight = np.arange(24, dtype=np.float32).reshape(6, 4)
    tied = np.arange(6, dtype=np.int16)
    return {
        "model": {"layer.0.weight": weight, "scale": np.array(2.5), "empty": np.zeros((0, 3), np.int8)},
        "half": np.arange(5).astype(ml_dtypes.bfloat16),
        "complex": np.array([1 + 2j, 3 - 4j]),
        "tied": {"a": tied, "b": tied},
        "table": hyper_ckpt.ShardedTensor(
            [(np.full((2, 2), rank, np.uint8), (0, 2 * rank)), (np.full((1, 4), 7 + rank, np.uint8), (2 + rank, 0))],
            (4, 4),
        ),
        "a/b~c": 1,
        3: "three",
        "values": [None, True, 2**70, -0.0, float("inf"), "é", b"\x00\xff", (1, 2), {1, 2}, range(3), Point(1, [2])],
        "ordered": OrderedDict(b=1, a=2),
        "when": datetime.date(2026, 1, 2),
        "path": PurePosixPath("/data/x"),
        "per_rank": hyper_ckpt.PerRank({"rank": rank}),
        "differs": 10 + rank,
        "large": list(range(20_000)),
    }
