"""Which checkpoints of a run stay."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from hyper_ckpt.manager.arguments import check_above_zero, check_count

_OFF = "; None switches the rule off"


@dataclass(frozen=True)
class Kept:
    """What retention looks at in a complete checkpoint. `created`: seconds since the epoch."""

    step: int
    created: float
    pinned: bool
    metrics: Mapping[str, float | None]


@dataclass(frozen=True)
class Retention:
    """Which complete checkpoints stay. One that any rule keeps stays; without rules, all do.

    Args:
        last: as many of the highest steps.
        every: those whose step is a multiple of it.
        hours: those that were saved within so many hours.
        best: as many with the best `metric`, of equals the later ones; those without it are not among them. While no
            checkpoint has it, all stay.
        metric: its name in the `metrics` that `save` is given.
        mode: whether small or large values are good.

    The highest step and pinned ones stay always.

    Raises:
        ValueError, TypeError: a number is not positive, or none, or mode is neither.
    """

    last: int | None = None
    every: int | None = None
    hours: float | None = None
    best: int | None = None
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), _OFF)
        if self.hours is not None:
            check_above_zero("hours", self.hours, _OFF)
        if not isinstance(self.metric, str):
            raise TypeError(f"metric must be the name of one, not {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f'mode is "min" or "max", not {self.mode!r}')

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return self.last is self.every is self.hours is self.best is None

    def kept(self, found: Collection[Kept], now: float) -> set[int]:
        """The steps that stay.

        Args:
            found: every complete checkpoint.
            now: seconds since the epoch.
        """
        steps = sorted(each.step for each in found)
        if self.keeps_all or not steps:
            return set(steps)
        out = self._kept_but_for_best(found, now)
        if self.best is not None:
            best = self._best(found)
            out.update(best[: self.best] if best else steps)
        return out

    def unmeasured(self, found: Collection[Kept], now: float) -> bool:
        """Whether checkpoints stay for no other reason than that none has the metric to choose the best by."""
        if self.best is None or not found or self._best(found):
            return False
        return len(self._kept_but_for_best(found, now)) < len(found)

    def _kept_but_for_best(self, found: Collection[Kept], now: float) -> set[int]:
        steps = sorted(each.step for each in found)
        out = {steps[-1], *(each.step for each in found if each.pinned)}
        if self.last is not None:
            out.update(steps[-self.last :])
        if self.every is not None:
            out.update(step for step in steps if step % self.every == 0)
        if self.hours is not None:
            out.update(each.step for each in found if now - each.created <= self.hours * 3600)
        return out

    def _best(self, found: Collection[Kept]) -> list[int]:
        """Steps that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        ranked = []
        for each in found:
            value = each.metrics.get(self.metric)
            if value is not None and math.isfinite(value):
                ranked.append((sign * value, -each.step))
        return [-step for _, step in sorted(ranked)]
