"""A checkpoint of four ranks, and the command as a process."""

import os
import subprocess
import sys
from typing import Any

import numpy as np

import hyper_ckpt
from hyper_ckpt import PerRank, ShardedTensor
from hyper_ckpt.contracts.platform import Platform
from hyper_ckpt.testing.world import run_world

LONG = "layers.31.self_attention.query_key_value_projection.weight_with_a_long_name"


def state_of(rank: int, step: int) -> dict[str, Any]:
    """What rank `rank` of 4 holds."""
    tied = np.ones((3, 5), np.float32)
    rows = np.arange(16, dtype=np.float32).reshape(2, 8) + 16 * rank
    return {
        "model": {
            LONG: ShardedTensor([(rows, (2 * rank, 0))], (8, 8)),
            "grid": ShardedTensor([(np.ones((4, 4), np.int16), (4 * (rank // 2), 4 * (rank % 2)))], (8, 8)),
            "embedding": tied,
            "head": tied,
        },
        "optimizer": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": float("nan")},
        "rng": PerRank(rank),
        "step": step,
    }


def save_by_four(where: str, step: int = 7, **options: Any) -> None:
    def rank_main(platform: Platform) -> None:
        state = state_of(platform.ranks.rank, step)
        hyper_ckpt.save(state, where, platform=platform, durable=False, user_metadata={"run": "a"}, **options)

    run_world(4, rank_main)


def process(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as users do, its output in pipes."""
    return subprocess.run(
        [sys.executable, "-m", "hyper_ckpt.cli", *map(str, args)],
        env={**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **env},
        capture_output=True,
        encoding=env.get("PYTHONIOENCODING", "utf-8").partition(":")[0],
        timeout=50,
        check=False,
    )
