"""The rarer options of save and load, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verify = Literal["off", "during", "before"]
Strict = bool | Literal["exact"]

DEFAULT_TIMEOUT = 1800.0
DEFAULT_MAX_HOST_BYTES = 256 << 20
LEFTOVER_AGE = 24 * 3600.0


@dataclass(frozen=True)
class SaveOptions:
    """Rarer options of `save`.

    Args:
        conflicts: what to do where ranks hold different values under one name: "warn" keeps plain
            values per rank and, of tensors, the lowest rank's; "error" refuses to save.
        allow_pickle: pickle values that no codec knows. The load must say it too.
        leftover_age: seconds after which the files of a save that died may be removed by a save to the
            same path.
    """

    conflicts: Literal["warn", "error"] = "warn"
    allow_pickle: bool = False
    leftover_age: float = LEFTOVER_AGE

    def __post_init__(self) -> None:
        if self.conflicts not in ("warn", "error") or self.leftover_age < 0:
            raise ValueError(f'conflicts is "warn" or "error" and leftover_age at least 0 seconds, not {self}')


@dataclass(frozen=True)
class LoadOptions:
    """Rarer options of `load`.

    Args:
        allow_pickle: unpickle values saved with `allow_pickle`. Runs code from the checkpoint: only for
            checkpoints you trust.
        broadcast_batch_bytes: bytes that one rank reads before it passes them on, where reads are shared.
    """

    allow_pickle: bool = False
    broadcast_batch_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.broadcast_batch_bytes < 1:
            raise ValueError(f"broadcast_batch_bytes must be at least 1, not {self.broadcast_batch_bytes}")
