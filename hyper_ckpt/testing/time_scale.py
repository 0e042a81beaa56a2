"""Time limits of tests, longer on a busy machine."""

from __future__ import annotations

import os

TIME_SCALE = float(os.environ.get("HYPER_CKPT_TEST_TIME_SCALE", "1"))
"""Factor of all time limits of launchers and tests. A limit says that something hangs, never that it is fast."""


def scaled(seconds: float) -> float:
    """A time limit of so many seconds on a quiet machine."""
    return seconds * TIME_SCALE
