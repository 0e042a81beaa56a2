"""One save or load as all ranks see it: steps that end alike for everybody, or not at all."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from hyper_ckpt.agreement.exchange import Exchange
from hyper_ckpt.agreement.heartbeat import SILENT_SECONDS, Listener, beating
from hyper_ckpt.agreement.verdict import Verdict, Vote, is_interrupt, names, rebuild, report, unpack, vote_of
from hyper_ckpt.contracts.platform import KeyValueStore, Ranks
from hyper_ckpt.description import Description, World
from hyper_ckpt.errors import CheckpointError, RankFailedError, RanksDisagreeError, RankTimeoutError
from hyper_ckpt.text import clean

PARTING_SECONDS = 5.0
"""How long rank 0 stays at the end of an operation for ranks that do not say that they heard how it ended."""
SLICE_SECONDS = 1.0
"""Waiting is done in slices, between which dead ranks are looked for."""
LATE_SECONDS = 2.0
"""How long a call on the key-value store waits for its answer once the deadline is over."""
_PAUSE_SECONDS = 0.02
_KEPT_INCOMPLETE = 16


class StoppedError(CheckpointError):
    """Another rank failed; not for users: `Operation.agree` raises the reason."""


def in_step(ranks: Ranks, number: int, call: str, timeout: float) -> int:
    """The number of this rank's next operation: its own, or a higher one where it has missed some.

    Ranks count their calls. One that skipped a call, because its own code failed before it, would be behind for
    ever. It sees that where rank 0 (for rank 0: rank 1) is at that number or a later one in another call: if they have
    given up on that, it waits until they come to their next one; else it joins them there, and all see that they call
    different things.

    Args:
        call: what tells calls apart, e.g. the path.
        timeout: seconds to wait at most.
    """
    ranks.timeout = timeout
    if ranks.world_size == 1:
        return number
    limit = time.monotonic() + timeout
    store = ranks.key_value_store.within(lambda: max(limit - time.monotonic(), LATE_SECONDS))
    peer, call = 1 if ranks.rank == 0 else 0, clean(call)
    while (data := store.get(f"hyper-ckpt/at/{peer}")) is not None and time.monotonic() < limit:
        theirs, their_call = unpack(data, tuple[int, str], peer)
        if theirs >= number and their_call != call and _is_over(store, ranks.rank, theirs):
            time.sleep(_PAUSE_SECONDS)
            continue
        number = max(number, theirs)
        break
    store.set(f"hyper-ckpt/at/{ranks.rank}", msgspec.msgpack.encode((number, call)))
    return number


def _is_over(store: KeyValueStore, rank: int, number: int) -> bool:
    """Whether the others have given up on an operation that this rank never came to."""
    key = f"hyper-ckpt/{number}/0"
    if rank != 0:
        return store.get(key) is not None
    vote = store.get(f"{key}/1")
    return vote is not None and unpack(vote, Vote, 1).error == RankTimeoutError.__name__


Decide = Callable[[list[bytes]], bytes]
# Operations at whose end some ranks were missing, and of which something is therefore left in the store.
_incomplete: weakref.WeakKeyDictionary[Ranks, deque[int]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Operation:
    """One save or load as all ranks see it: messages under its own number, and one deadline.

    Args:
        ranks: of the platform.
        number: the same on every rank.
        timeout: seconds until ranks that have not answered are reported: from now, then from when all were there.

    `settled` is False while this rank does not know how a step ended for the others, also after it gave up waiting.
    `late_ranks`, at rank 0 once the operation is over: those that gave up waiting for its end.
    """

    ranks: Ranks
    number: int
    timeout: float
    _deadline: float = field(init=False)
    _decided: float = field(init=False, default=0.0)
    _step_begun: float = field(init=False, default=0.0)
    _steps: int = field(init=False, default=0)
    settled: bool = field(init=False, default=True)
    late_ranks: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.timeout

    @cached_property
    def _store(self) -> KeyValueStore:
        """The key-value store, for calls that last no longer than the operation may."""
        return self.ranks.key_value_store.within(lambda: max(self._given_up_at - time.monotonic(), LATE_SECONDS))

    @cached_property
    def _listener(self) -> Listener:
        return Listener(self._store, self._beat_key)

    @property
    def _given_up_at(self) -> float:
        """When this rank stops waiting for rank 0, which waits until the deadline itself before it says so."""
        return self._deadline + 1.0 + 0.05 * self.timeout

    def agree(
        self,
        step: str,
        value: bytes = b"",
        error: BaseException | None = None,
        decide: Decide | None = None,
        last: bool = False,
    ) -> bytes:
        """Ends a step: rank 0 hears everybody's value or error and tells all what comes of it.

        No collective is used, so a rank that failed, or died, keeps nobody waiting past the deadline.

        Args:
            step: what is being done, for the error's text.
            value: what this rank has to say.
            error: why this rank cannot go on.
            decide: at rank 0, turns the values, by rank, into the common one; may raise.
            last: the operation ends here if all goes well.

        Returns:
            What `decide` returned (empty without it).

        Raises:
            CheckpointError: the first failing rank's error, the same class and text on all ranks.
            RankTimeoutError: ranks that did not answer before the deadline.
        """
        key = self._step_key
        self._steps += 1
        self._step_begun = time.monotonic()
        if self.ranks.world_size == 1:
            if error is not None:
                raise error
            return decide([value]) if decide else b""
        self.settled = False
        rank = self.ranks.rank
        self._store.set(f"{key}/{rank}", msgspec.msgpack.encode(Vote(value) if error is None else vote_of(error)))
        if rank == 0:
            verdict, error = self._lead(key, step, error, decide)
        elif is_interrupt(error):
            verdict = Verdict()
            self._take_leave(key)
        else:
            verdict = self._wait(key, step)
        if error is not None and is_interrupt(error):
            # The others know now, and this process has other things to do than to wait for them.
            raise error
        if last or verdict.error:
            self._part(key, verdict)
        if verdict.error:
            raise rebuild(verdict, error) from error
        if self._steps == 1:
            # Ranks may come up to a timeout apart. From here on their clocks run together.
            self._deadline = self._decided + self.timeout
        return verdict.value

    def _part(self, key: str, verdict: Verdict) -> None:
        """Keeps rank 0, whose process may host the store, until the others have heard how the operation ended. Then
        nothing of it is left in the store, unless ranks are missing."""
        gone = verdict.ranks if verdict.error == "RankTimeoutError" else ()
        if self.ranks.rank != 0:
            self._take_leave(key)
            with suppress(RankFailedError, RankTimeoutError):
                self._forget(complete=not gone)
            return
        waiting = {f"{key}/heard/{r}" for r in range(1, self.ranks.world_size) if r not in gone}
        limit = time.monotonic() + PARTING_SECONDS
        while waiting and (remaining := limit - time.monotonic()) > 0:
            waiting -= self._store.get_many(waiting, remaining).keys()
        self.late_ranks = self.gave_up()
        # Not of the whole operation: a step may follow, as where a load begins again, and ranks may have spoken there.
        before = f"hyper-ckpt/{self.number}/{self._steps - 2}"
        self._store.delete_prefix(f"{before}/")  # batches of a load
        self._store.delete_prefix(f"{key}/")
        self._store.delete(before)
        if not waiting and not gone:  # else ranks that come to this operation after all learn that it is over
            self._store.delete(key)
        self._forget(complete=not waiting and not gone)

    def _take_leave(self, key: str) -> None:
        """Tells rank 0 that it need not stay for this rank, which knows how the operation ended, or gave up. If rank 0
        has left already, or is stopped, that changes nothing."""
        with suppress(RankFailedError, RankTimeoutError):
            store = self.ranks.key_value_store.within(lambda: PARTING_SECONDS)
            store.set(f"{key}/heard/{self.ranks.rank}", b"1")

    def _forget(self, complete: bool) -> None:
        """Removes what earlier operations left, once all ranks have come past them; remembers this one, if it was not
        complete."""
        left = _incomplete.setdefault(self.ranks, deque())
        if not complete:
            left.append(self.number)
        while left and (complete or len(left) > _KEPT_INCOMPLETE):
            self._store.delete_prefix(f"hyper-ckpt/{left.popleft()}/")

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; below 0 after it."""
        return self._deadline - time.monotonic()

    def gave_up(self) -> tuple[int, ...]:
        """At rank 0, while it decides how the latest step ends: ranks that gave up waiting for that."""
        now = time.monotonic()
        if now <= self._deadline and now - self._step_begun < SILENT_SECONDS / 2:
            return ()  # none can have
        keys = {f"hyper-ckpt/{self.number}/{self._steps - 1}/{r}": r for r in range(1, self.ranks.world_size)}
        votes = {r: unpack(data, Vote, r) for key, data in self._store.get_many(keys).items() for r in [keys[key]]}
        return tuple(r for r, vote in votes.items() if vote.error)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around long work and the step that ends it: gives signs of life, so that slow is not taken for dead."""
        if self.ranks.world_size == 1:
            yield
            return
        with beating(self._store, self._beat_key(self.ranks.rank)):
            yield

    def _beat_key(self, rank: int) -> str:
        return f"hyper-ckpt/{self.number}/beat/{rank}"

    @property
    def _step_key(self) -> str:
        return f"hyper-ckpt/{self.number}/{self._steps}"

    def stop(self) -> None:
        """Tells ranks that wait in `batch_ready` that this one comes to no more batches; `agree` then says why."""
        self._store.set_many({f"{self._step_key}/stop/{self.ranks.rank}": b"1", f"{self._step_key}/stop": b"1"})

    def batch_ready(self, batch: str, group: Sequence[int]) -> None:
        """Waits until every rank of `group` has come to this batch, so that their collective keeps nobody waiting.

        The group's first rank decides alone, so that either all enter the collective or none.

        Raises:
            StoppedError: some rank failed: `agree` has the reason.
            RankTimeoutError: ranks that did not come before the deadline.
        """
        key, rank = f"{self._step_key}/batch/{batch}", self.ranks.rank
        # The first rank begins nothing once any rank failed; the others wait for what it decides unless it is gone.
        stop = f"{self._step_key}/stop" if rank == group[0] else f"{self._step_key}/stop/{group[0]}"
        if rank != group[0]:
            self._store.set(f"{key}/{rank}", b"1")
        waiting = {f"{key}/{r}": r for r in group[1:]} if rank == group[0] else {key: group[0]}
        limit = self._deadline + (0 if rank == group[0] else 1.0)
        while waiting:
            found = self._store.get_many([stop, *waiting], min(SLICE_SECONDS, limit - time.monotonic()))
            failed = found.pop(stop, None) is not None
            if b"0" in found.values():
                raise StoppedError
            for each in found:
                del waiting[each]
            # Also where all have come to this batch: a rank that gave up waiting is gone again.
            if failed and rank == group[0]:
                self._store.set(key, b"0")
                raise StoppedError
            if failed and waiting:
                raise StoppedError
            if waiting and time.monotonic() > limit:
                silent = sorted(waiting.values())
                raise RankTimeoutError(f"reading: {names(silent)} did not answer within {self.timeout:g} s", silent)
        if rank == group[0]:
            self._store.delete(*(f"{key}/{r}" for r in group[1:]))
            self._store.set(key, b"1")

    def _lead(
        self, key: str, step: str, error: BaseException | None, decide: Decide | None
    ) -> tuple[Verdict, BaseException | None]:
        """At rank 0: counts, decides and tells. Returns the verdict, and the error that this rank itself met."""
        votes = self._count(key)
        self._decided = time.monotonic()
        silent = tuple(r for r in range(self.ranks.world_size) if r not in votes)
        silent = tuple(sorted(self._listener.dead_ranks & set(silent))) or silent
        bad = {r: v for r, v in sorted(votes.items()) if v.error}
        verdict = Verdict()
        if bad:
            verdict = report(step, bad)
        elif silent:
            message = f"{step}: {names(silent)} {self._excuse(set(silent))}"
            verdict = Verdict(error="RankTimeoutError", message=message, ranks=silent)
        elif decide is not None:
            try:
                verdict = Verdict(decide([votes[r].value for r in range(self.ranks.world_size)]))
            except BaseException as own:  # also an interrupt: the others must not wait for the deadline
                verdict, error = report(step, {0: vote_of(own)}), own
        self._store.set(key, msgspec.msgpack.encode(verdict))
        self.settled = True
        if not silent:
            # Everybody who voted now has read the verdict before; one that has not may still look for it.
            self._store.delete(f"hyper-ckpt/{self.number}/{self._steps - 2}")
        return verdict, error

    def _excuse(self, silent: set[int]) -> str:
        """What is known of ranks that did not answer."""
        if silent & self._listener.dead_ranks:
            return (
                f"gave no sign of life for {SILENT_SECONDS:g} s: the process has ended, or was stopped. Look at its log"
            )
        late = f"did not answer within {self.timeout:g} s"
        if silent == self._listener.alive(silent):
            return f"{late}, but still at work: raise timeout=, or find out what makes it slow"
        return (
            f"{late}. Look at the log: it may have died, hang, or never have called; raise timeout= if it is only slow"
        )

    def _count(self, key: str) -> dict[int, Vote]:
        """The votes: everybody's, or those until one was an error or the time was up."""
        votes = dict[int, Vote]()
        missing = {f"{key}/{rank}": rank for rank in range(self.ranks.world_size)}
        while missing:
            found = self._store.get_many(missing, min(SLICE_SECONDS, self._deadline - time.monotonic()))
            self._store.delete(*found)
            for each, data in found.items():
                rank = missing.pop(each)
                votes[rank] = unpack(data, Vote, rank)
            # Who failed is known: the others are told at once, however long they would still work.
            if any(v.error for v in votes.values()):
                return votes
            dead = self._listener.dead(set(missing.values()))
            if not found and (dead or time.monotonic() > self._deadline):
                return votes
        if time.monotonic() > self._deadline:
            # This rank was late itself: ranks that gave up waiting for it have voted again.
            again = self._store.get_many([f"{key}/{rank}" for rank in votes])
            votes |= {r: unpack(again[k], Vote, r) for r in votes if (k := f"{key}/{r}") in again}
        return votes

    def _wait(self, key: str, step: str) -> Verdict:
        data = None
        while data is None and (remaining := self._given_up_at - time.monotonic()) > 0 and not self._listener.dead({0}):
            data = self._store.get(key, min(SLICE_SECONDS, remaining))
        given_up = Verdict(error="RankTimeoutError", message=f"{step}: rank 0 {self._excuse({0})}", ranks=(0,))
        if data is None:
            # Should it come after all, it must not go on without this rank; but it may have decided just now.
            late = Vote(error=given_up.error, message=given_up.message, ranks=given_up.ranks)
            self._store.set(f"{key}/{self.ranks.rank}", msgspec.msgpack.encode(late))
            data = self._store.get(key)
        if data is None:
            return given_up
        self._decided, self.settled = time.monotonic(), True
        return unpack(data, Verdict, 0)

    def meet(self, options: dict[str, str], error: BaseException | None = None) -> None:
        """All ranks are here, none has failed yet, and all called with the same options.

        Raises:
            RanksDisagreeError: names the option, the ranks and both values.
        """
        sendable = {key: clean(value) for key, value in options.items()}
        self.agree("meeting", msgspec.msgpack.encode(sendable), error, _same_options)

    def exchange(self, description: Description) -> World:
        """What all ranks described. Collective; call only after `meet`.

        Explicit boxes are known to rank 0 only. Replicas whose fingerprints differ are in `conflicts`.
        """
        return Exchange(self.ranks, description).run()


def _same_options(values: list[bytes]) -> bytes:
    first = unpack(values[0], dict[str, str], 0)
    for rank, value in enumerate(values):
        if value == values[0]:
            continue
        other = unpack(value, dict[str, str], rank)
        for key in first | other:
            if first.get(key) != other.get(key):
                raise RanksDisagreeError(
                    f"ranks called with different {key}: {first.get(key, 'nothing')} on rank 0 but "
                    f"{other.get(key, 'nothing')} on rank {rank}. Call with the same arguments on every rank"
                )
    return b""
