"""The rarer options of save and load, frozen."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

Verify = Literal["off", "during", "before"]
KeyMap = Mapping[str, str] | Callable[[str], str | Sequence[str] | None]
ShareReads = bool | Literal["auto"]
Strict = bool | Literal["exact"]

DEFAULT_TIMEOUT = 1800.0
DEFAULT_MAX_HOST_BYTES = 256 << 20
LEFTOVER_AGE = 24 * 3600.0


@dataclass(frozen=True)
class SaveOptions:
    """Rarer options of `save`.

    Args:
        conflicts: what to do where ranks hold different values under one name. "keep": each rank's is kept, with a
            warning, and only these ranks get them back without a word, see `LoadOptions.conflicts`. "warn": of tensors,
            the lowest rank's is kept, with a warning; plain values are kept per rank. "error" refuses to save.
        allow_pickle: pickle values that no codec knows. The load must say it too.
        leftover_age: seconds after which the files of a save that died may be removed by a save to the
            same path.
        save_token: for `use_collectives=False` on several ranks: what makes their files one save. Equal on all
            ranks, and never used again, not even for a second attempt at the same step.
        executor: for `async_save`: who writes, a "thread" of this process, or a "process" beside it, which sees the
            copies in shared memory, for training loops that keep the interpreter busy.
        max_in_flight: for `async_save`: how many saves of a platform may be open; the next call waits for room.
        progress: show how far a long save is: on a terminal a bar, else a log line now and then. Also
            HYPER_CKPT_PROGRESS=0.
    """

    conflicts: Literal["keep", "warn", "error"] = "keep"
    allow_pickle: bool = False
    leftover_age: float = LEFTOVER_AGE
    save_token: str | None = None
    executor: Literal["thread", "process"] = "thread"
    max_in_flight: int = 1
    progress: bool = field(default=True, repr=False)  # not in what ranks compare: they may differ in it

    def __post_init__(self) -> None:
        if self.conflicts not in ("keep", "warn", "error") or self.leftover_age < 0:
            raise ValueError(f'conflicts is "keep", "warn" or "error" and leftover_age at least 0 seconds, not {self}')
        if self.executor not in ("thread", "process"):
            raise ValueError(f'executor is "thread" or "process", not {self.executor!r}')
        _check_saves(self.max_in_flight, self.save_token)


def _check_saves(max_in_flight: object, save_token: object) -> None:
    if not isinstance(max_in_flight, Integral) or max_in_flight < 1:
        raise ValueError(f"max_in_flight must be an integer from 1 on, not {max_in_flight!r}")
    if save_token is not None and (not isinstance(save_token, str) or not save_token):
        raise ValueError(f"save_token must be a string with something in it, not {save_token!r}")


def _patterns(name: str, value: object) -> tuple[str, ...]:
    """Names or patterns of them, one or several."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{name} is a name, a pattern, or several of them in a list, not {value!r}")
    return tuple(found)


@dataclass(frozen=True)
class LoadOptions:
    """Rarer options of `load`.

    Args:
        allow_pickle: unpickle values saved with `allow_pickle`. Runs code from the checkpoint: only for
            checkpoints you trust.
        broadcast_batch_bytes: bytes that one rank reads before it passes them on, where reads are shared; 0: each box
            by itself, whatever its size.
        progress: as for a save.
        map_keys: the saved name of a name in the target, where they differ: a dict, or a function that returns a
            name, several of which the first that was saved is taken, or None for its own name. A name that was not
            saved is missing. The name of an object stands for all of it. `LoadReport.mapped` says what matched.
        cast: convert values where the target has another dtype than was saved: True, or only for these names of the
            target and what lies below them, patterns as in `read(keys=)`. Between float dtypes, between complex ones,
            and to integers that hold every value of the saved dtype; all else is refused as ever. `LoadReport.cast`
            says what was converted. An object is handed its state as it was saved.
        partial: of a save with `use_collectives=False` of which ranks' parts are missing, load what the others' cover.
            What this rank wants beyond that is left as it was, with a warning: `LoadReport.missing` and `unfilled`.
        ignore: saved names that are meant to be left out, and what lies below them; patterns as in `read(keys=)`. No
            line, warning or error says that the target has no place for them.
        conflicts: whose tensor to take where ranks saved different ones under one name. "own": each rank's own, if the
            ranks are as many as saved; else it is an error. A number: that rank's, for all; an error where it saved
            none. "lowest": that of the lowest rank that saved one. A number, and "lowest", also choose between plain
            values that ranks saved differently; else a rank gets its own, or the lowest rank's with a warning.
    """

    allow_pickle: bool = False
    broadcast_batch_bytes: int = 64 << 20
    progress: bool = field(default=True, repr=False)  # not in what ranks compare: they may differ in it
    map_keys: KeyMap | None = field(default=None, repr=False)  # what comes of it is compared instead
    ignore: str | Sequence[str] = ()
    cast: bool | str | Sequence[str] = False
    partial: bool = False
    conflicts: int | Literal["own", "lowest"] = "own"

    @property
    def cast_keys(self) -> tuple[str, ...]:
        """The names of the target, or patterns of them, that may be converted."""
        return ("*",) if self.cast is True else _patterns("cast", self.cast or ())

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", _patterns("ignore", self.ignore))
        object.__setattr__(self, "cast", self.cast if isinstance(self.cast, bool) else _patterns("cast", self.cast))
        object.__setattr__(self, "broadcast_batch_bytes", operator.index(self.broadcast_batch_bytes))
        if self.broadcast_batch_bytes < 0:
            raise ValueError(f"broadcast_batch_bytes must be at least 0, not {self.broadcast_batch_bytes}")
        is_rank = type(self.conflicts) is int and self.conflicts >= 0
        if not is_rank and self.conflicts not in ("own", "lowest"):
            raise ValueError(f'conflicts is "own", "lowest" or the number of a rank, not {self.conflicts!r}')
        if not (self.map_keys is None or isinstance(self.map_keys, Mapping) or callable(self.map_keys)):
            raise ValueError(f"map_keys is a dict or a function, not a {type(self.map_keys).__name__}")
