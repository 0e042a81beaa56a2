"""Levelling: how many bytes each holder of a group takes."""

from __future__ import annotations

import numpy as np

from hyper_ckpt.box import IntArray


def water_fill(loads: IntArray, amounts: IntArray) -> IntArray:
    """Shares of `amounts` that level the holders' loads, lowest first, ties in order.

    Args:
        loads: (groups, holders) bytes that each already has.
        amounts: (groups,) bytes to share out.

    Returns:
        (groups, holders) shares, at least 0, summing to `amounts`.
    """
    count = loads.shape[1]
    ordered = np.sort(loads, axis=1)
    # Raising the k lowest to a common level costs k * level - sum: take the largest k whose
    # highest member lies below the level.
    levels = (amounts[:, None] + np.cumsum(ordered, axis=1)) / np.arange(1, count + 1)
    wet = (levels > ordered).sum(axis=1) if count else np.zeros(0, np.int64)
    level = np.take_along_axis(levels, np.maximum(wet - 1, 0)[:, None], axis=1)
    exact = np.maximum(level - loads, 0.0)
    bounds = np.rint(np.cumsum(exact, axis=1)).astype(np.int64)
    bounds = np.minimum(bounds, amounts[:, None])
    bounds[:, -1] = amounts
    return np.diff(bounds, axis=1, prepend=0)
