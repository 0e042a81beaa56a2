"""When all ranks save: the same answer on each, without a collective."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from hyper_ckpt.agreement.verdict import unpack
from hyper_ckpt.contracts.platform import Ranks
from hyper_ckpt.errors import RanksDisagreeError
from hyper_ckpt.manager.arguments import check_above_zero, check_count


@dataclass(frozen=True)
class SaveInterval:
    """How often a run saves. A step at which any rule asks for it is saved.

    Args:
        steps: at multiples of it, 0 excepted.
        minutes: when so many have gone by since the last save, by the clock of rank 0.
        lead: what rank 0 decides (by the clock, or since the job is to end), it decides for its `lead`-th next call
            of `should_save`: no rank may be that many calls ahead of it. 1 is enough where every step waits for all
            ranks; where a rank's host may run ahead of its device, the steps that it may, and one more.

    Raises:
        ValueError, TypeError: a number is not positive, or none.
    """

    steps: int | None = None
    minutes: float | None = None
    lead: int = 2

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count("steps", self.steps)
        if self.minutes is not None:
            check_above_zero("minutes", self.minutes)
        check_count("lead", self.lead)

    def includes(self, step: int) -> bool:
        """Whether the rule for steps asks for this one."""
        return self.steps is not None and step > 0 and step % self.steps == 0

    def comes(self, after: int, until: int) -> bool:
        """Whether the rule for steps asks for one after `after` and up to `until`."""
        return self.steps is not None and until // self.steps > after // self.steps


class _Call(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 tells all: save at the first step from this one on."""

    number: int
    step: int
    preempts: bool


class Schedule:
    """Answers `should_save` on one rank.

    What steps alone decide needs no message. For the rest, each call looks once into the store: rank 0 whether
    anybody asked to end, the others whether rank 0 named a step.

    Args:
        ranks: of the platform.
        interval: how often.
        listens: whether anybody may ask to end.
        key: under which messages stand, the same on every rank and for this schedule alone.

    `talks` says whether what one rank asks for reaches the others; `preempted`, whether all were told to end.
    """

    def __init__(self, ranks: Ranks, interval: SaveInterval, listens: bool, key: str) -> None:
        self._ranks, self._interval, self._key = ranks, interval, key
        self.talks = listens or interval.minutes is not None or ranks.world_size == 1
        self._asked = False  # set by a signal handler
        self._told = False
        self._call: _Call | None = None
        self._done = 0
        self._step: int | None = None
        self._answer = False
        self._since = time.monotonic()
        self.preempted = False

    def ask(self) -> None:
        """Asks all ranks to save and end. Only sets a flag: may be called from a signal handler."""
        self._asked = True

    def begun(self) -> None:
        """A save begins: the clock starts again."""
        self._since = time.monotonic()

    def restart(self) -> None:
        """All ranks go on at another step: what was named for the old ones is void. Called before they meet."""
        self.begun()
        self._step = None
        if self._ranks.rank == 0 and self._call is not None and self._call.number != self._done:
            self._done = self._call.number
            if self._ranks.world_size > 1:
                self._ranks.key_value_store.delete(f"{self._key}/call")
            self._told = self._told and not self._call.preempts

    def due(self, step: int) -> bool:
        """Whether to save at this step. The same on all ranks, and for a step that is asked about twice.

        Raises:
            RanksDisagreeError: rank 0 named a step that this rank has passed.
            RankFailedError: the key-value store is gone, and rank 0 with it.
            RankTimeoutError: rank 0, which hosts it, does not answer.
        """
        if step != self._step:
            self._answer = self._decide(step)
            self._step = step
        return self._answer

    def _decide(self, step: int) -> bool:
        by_steps = self._interval.includes(step)
        if not self.talks:
            return by_steps
        last = self._step if self._step is not None and self._step < step else None
        if self._ranks.rank == 0:
            self._lead(step, last)
        else:
            self._follow()
        call = self._call
        if call is None or call.number == self._done or step < call.step:
            return by_steps
        if last is not None and last >= call.step:
            raise RanksDisagreeError(
                f"rank 0 named step {call.step} for a save, and rank {self._ranks.rank} is at {step} already: call "
                "should_save with the same steps on every rank, or raise SaveInterval(lead=...) above "
                f"{self._interval.lead}, by as many calls as ranks may be apart"
            )
        self._done = call.number
        self.preempted = self.preempted or call.preempts
        self.begun()
        return True

    def _lead(self, step: int, last: int | None) -> None:
        """At rank 0: names a step, unless one is named already."""
        if self._call is not None and self._call.number != self._done:
            return
        alone, interval = self._ranks.world_size == 1, self._interval
        if last is None and not alone:
            return  # which steps the next calls will be for is not known yet
        at = step if alone or last is None else step + (interval.lead - 1) * (step - last) + 1
        asked = not self._told and (
            self._asked or (not alone and self._ranks.key_value_store.get(f"{self._key}/asked") is not None)
        )
        late = interval.minutes is not None and time.monotonic() - self._since >= 60 * interval.minutes
        if not asked and (not late or interval.includes(step) or interval.comes(step, at)):
            return
        self._told = self._told or asked
        self._call = _Call(self._done + 1, at, asked)
        if not alone:
            self._ranks.key_value_store.set(f"{self._key}/call", msgspec.msgpack.encode(self._call))

    def _follow(self) -> None:
        store = self._ranks.key_value_store
        if self._asked and not self._told:
            self._told = True
            store.set(f"{self._key}/asked", b"1")
        data = store.get(f"{self._key}/call")
        self._call = None if data is None else unpack(data, _Call, 0)
