"""Runs to look at, and what is in them."""

from typing import Any

import numpy as np

from hyper_ckpt import CheckpointManager, NumpyPlatform


def state(step: int = 0) -> dict[str, Any]:
    return {"w": np.full(1000, float(step)), "step": step}


def manager(root: object, **options: Any) -> CheckpointManager:
    return CheckpointManager(str(root), **{"platform": NumpyPlatform(), "on_sigterm": False, **options})


def complete(m: CheckpointManager) -> list[int]:
    return [info.step for info in m.steps() if info.complete]


def fill(root: object, *steps: int, **options: Any) -> CheckpointManager:
    m = manager(root, **options)
    for step in steps:
        m.save(step, state(step), durable=False)
    return m
