"""One save or load as all ranks see it: steps that end alike for everybody, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from hyper_ckpt.agreement.exchange import Exchange
from hyper_ckpt.agreement.heartbeat import SILENT_SECONDS, Listener, beating
from hyper_ckpt.agreement.verdict import Verdict, Vote, is_interrupt, names, printable, rebuild, report, vote_of
from hyper_ckpt.contracts.platform import Ranks
from hyper_ckpt.description import Description, World
from hyper_ckpt.errors import CheckpointError, RanksDisagreeError, RankTimeoutError

PARTING_SECONDS = 5.0
"""How long rank 0 stays at the end of an operation for ranks that do not say that they heard how it ended."""
# Looks into the mailbox are a little further apart each time: a long wait costs nothing, a short one little.
_FIRST_POLL, _LAST_POLL = 0.0002, 0.05


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
    mailbox, peer, call = ranks.mailbox, 1 if ranks.rank == 0 else 0, printable(call)
    limit, pause = time.monotonic() + timeout, _FIRST_POLL
    while (data := mailbox.get(f"hyper-ckpt/at/{peer}")) is not None and time.monotonic() < limit:
        theirs, their_call = msgspec.msgpack.decode(data, type=tuple[int, str])
        if theirs >= number and their_call != call and _is_over(ranks, theirs):
            pause = _sleep(pause)
            continue
        number = max(number, theirs)
        break
    mailbox.set(f"hyper-ckpt/at/{ranks.rank}", msgspec.msgpack.encode((number, call)))
    return number


def _is_over(ranks: Ranks, number: int) -> bool:
    """Whether the others have given up on an operation that this rank never came to."""
    key = f"hyper-ckpt/{number}/0"
    if ranks.rank != 0:
        return ranks.mailbox.get(key) is not None
    vote = ranks.mailbox.get(f"{key}/1")
    return vote is not None and msgspec.msgpack.decode(vote, type=Vote).error == RankTimeoutError.__name__


Decide = Callable[[list[bytes]], bytes]


@dataclass(eq=False)
class Operation:
    """One save or load as all ranks see it: messages under its own number, and one deadline.

    Args:
        ranks: of the platform.
        number: the same on every rank.
        timeout: seconds until ranks that have not answered are reported: from now, then from when all were there.

    `settled` is False while this rank does not know how a step ended for the others, also after it gave up waiting.
    """

    ranks: Ranks
    number: int
    timeout: float
    _deadline: float = field(init=False)
    _decided: float = field(init=False, default=0.0)
    _step_begun: float = field(init=False, default=0.0)
    _steps: int = field(init=False, default=0)
    _left: list[str] = field(init=False, default_factory=list)
    settled: bool = field(init=False, default=True)
    _listener: Listener = field(init=False)

    def __post_init__(self) -> None:
        self._listener = Listener(self.ranks, self._beat_key)
        self._deadline = time.monotonic() + self.timeout

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
        mailbox, rank = self.ranks.mailbox, self.ranks.rank
        mailbox.set(f"{key}/{rank}", msgspec.msgpack.encode(Vote(value) if error is None else vote_of(error)))
        if rank == 0:
            verdict, error = self._lead(key, step, error, decide)
        elif is_interrupt(error):
            verdict = Verdict()
            mailbox.set(f"{key}/heard/{rank}", b"1")  # nobody needs to stay for it
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
        """Keeps rank 0, whose process may host the mailbox, until the others have heard how the operation ended."""
        mailbox = self.ranks.mailbox
        if self.ranks.rank != 0:
            if not verdict.error:
                for old in self._left:  # everybody has come past the batches that this rank opened
                    mailbox.delete(old)
            # Also a rank that gave up: nobody needs to stay for it any more.
            mailbox.set(f"{key}/heard/{self.ranks.rank}", b"1")
            return
        gone = verdict.ranks if verdict.error == "RankTimeoutError" else ()
        waiting = {r for r in range(1, self.ranks.world_size) if r not in gone}
        limit, pause = time.monotonic() + PARTING_SECONDS, _FIRST_POLL
        while waiting and time.monotonic() < limit:
            heard = {r for r in waiting if mailbox.get(f"{key}/heard/{r}") is not None}
            for r in heard:
                mailbox.delete(f"{key}/heard/{r}")
            waiting -= heard
            pause = _FIRST_POLL if heard else _sleep(pause)
        if not waiting and not gone:
            for old in (key, f"hyper-ckpt/{self.number}/{self._steps - 2}", *self._left):
                mailbox.delete(old)

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; below 0 after it."""
        return self._deadline - time.monotonic()

    def gave_up(self) -> tuple[int, ...]:
        """At rank 0, while it decides how the latest step ends, and after: ranks that gave up waiting for that."""
        now = time.monotonic()
        if now <= self._deadline and now - self._step_begun < SILENT_SECONDS / 2:
            return ()  # nobody can have
        mailbox, key = self.ranks.mailbox, f"hyper-ckpt/{self.number}/{self._steps - 1}"
        again = {r: mailbox.get(f"{key}/{r}") for r in range(1, self.ranks.world_size)}
        votes = {r: msgspec.msgpack.decode(data, type=Vote) for r, data in again.items() if data is not None}
        return tuple(r for r, vote in votes.items() if vote.error)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around long work and the step that ends it: gives signs of life, so that slow is not taken for dead."""
        if self.ranks.world_size == 1:
            yield
            return
        with beating(self.ranks.mailbox, self._beat_key(self.ranks.rank)):
            yield

    def _beat_key(self, rank: int) -> str:
        return f"hyper-ckpt/{self.number}/beat/{rank}"

    @property
    def _step_key(self) -> str:
        return f"hyper-ckpt/{self.number}/{self._steps}"

    def stop(self) -> None:
        """Tells ranks that wait in `batch_ready` that this one comes to no more batches; `agree` then says why."""
        self.ranks.mailbox.set(f"{self._step_key}/stop/{self.ranks.rank}", b"1")
        self.ranks.mailbox.set(f"{self._step_key}/stop", b"1")

    def batch_ready(self, batch: str, group: Sequence[int]) -> None:
        """Waits until every rank of `group` has come to this batch, so that their collective keeps nobody waiting.

        The group's first rank decides alone, so that either all enter the collective or none.

        Raises:
            StoppedError: some rank failed: `agree` has the reason.
            RankTimeoutError: ranks that did not come before the deadline.
        """
        mailbox, key, rank = self.ranks.mailbox, f"{self._step_key}/batch/{batch}", self.ranks.rank
        # The first rank begins nothing once anybody failed; the others wait for what it decides unless it is gone.
        stop = f"{self._step_key}/stop" if rank == group[0] else f"{self._step_key}/stop/{group[0]}"
        if rank != group[0]:
            mailbox.set(f"{key}/{rank}", b"1")
        waiting = {f"{key}/{r}": r for r in group[1:]} if rank == group[0] else {key: group[0]}
        limit, pause = self._deadline + (0 if rank == group[0] else 1.0), _FIRST_POLL
        while waiting:
            failed = mailbox.get(stop) is not None  # looked at first: what was decided before still counts
            arrived = {k: v for k in waiting if (v := mailbox.get(k)) is not None}
            if b"0" in arrived.values():
                raise StoppedError
            for k in arrived:
                del waiting[k]
            silent = sorted(waiting.values())
            # Also where all have come to this batch: whoever gave up waiting is gone again.
            if failed and rank == group[0]:
                mailbox.set(key, b"0")
                raise StoppedError
            if failed and silent:
                raise StoppedError
            if silent and time.monotonic() > limit:
                raise RankTimeoutError(f"reading: {names(silent)} did not answer within {self.timeout:g} s", silent)
            if silent:
                pause = _sleep(pause)
        if rank == group[0]:
            for r in group[1:]:
                mailbox.delete(f"{key}/{r}")
            mailbox.set(key, b"1")
            self._left.append(key)

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
        self.ranks.mailbox.set(key, msgspec.msgpack.encode(verdict))
        self.settled = True
        if not silent:
            # Everybody who voted now has read the verdict before; one that has not may still look for it.
            self.ranks.mailbox.delete(f"hyper-ckpt/{self.number}/{self._steps - 2}")
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
        mailbox, votes = self.ranks.mailbox, dict[int, Vote]()
        pause = _FIRST_POLL
        while len(votes) < self.ranks.world_size:
            before = len(votes)
            for rank in range(self.ranks.world_size):
                data = None if rank in votes else mailbox.get(f"{key}/{rank}")
                if data is not None:
                    votes[rank] = msgspec.msgpack.decode(data, type=Vote)
                    mailbox.delete(f"{key}/{rank}")
            # Who failed is known: the others are told at once, however long they would still work.
            if any(v.error for v in votes.values()):
                return votes
            if len(votes) == before and time.monotonic() > self._deadline:
                return votes
            if len(votes) == before and self._listener.dead(set(range(self.ranks.world_size)) - votes.keys()):
                return votes
            pause = _sleep(pause) if len(votes) == before else _FIRST_POLL
        if time.monotonic() > self._deadline:
            # This rank was late itself: whoever gave up waiting for it has voted again.
            again = {r: mailbox.get(f"{key}/{r}") for r in votes}
            votes |= {r: msgspec.msgpack.decode(data, type=Vote) for r, data in again.items() if data is not None}
        return votes

    def _wait(self, key: str, step: str) -> Verdict:
        mailbox, pause = self.ranks.mailbox, _FIRST_POLL
        # Rank 0 waits until the deadline itself: give its verdict time to arrive.
        limit = self._deadline + 1.0 + 0.05 * self.timeout
        while (data := mailbox.get(key)) is None and time.monotonic() < limit and not self._listener.dead({0}):
            pause = _sleep(pause)
        given_up = Verdict(error="RankTimeoutError", message=f"{step}: rank 0 {self._excuse({0})}", ranks=(0,))
        if data is None:
            # Should it come after all, it must not go on without this rank; but it may have decided just now.
            late = Vote(error=given_up.error, message=given_up.message, ranks=given_up.ranks)
            mailbox.set(f"{key}/{self.ranks.rank}", msgspec.msgpack.encode(late))
            data = mailbox.get(key)
        if data is None:
            return given_up
        self._decided, self.settled = time.monotonic(), True
        return msgspec.msgpack.decode(data, type=Verdict)

    def meet(self, options: dict[str, str], error: BaseException | None = None) -> None:
        """All ranks are here, none has failed yet, and all called with the same options.

        Raises:
            RanksDisagreeError: names the option, the ranks and both values.
        """
        sendable = {key: printable(value) for key, value in options.items()}
        self.agree("meeting", msgspec.msgpack.encode(sendable), error, _same_options)

    def exchange(self, description: Description) -> World:
        """What all ranks described. Collective; call only after `meet`.

        Explicit boxes are known to rank 0 only. Replicas whose fingerprints differ are in `conflicts`.
        """
        return Exchange(self.ranks, description).run()


def _sleep(pause: float) -> float:
    time.sleep(pause)
    return min(pause * 1.1, _LAST_POLL)


def _same_options(values: list[bytes]) -> bytes:
    first = msgspec.msgpack.decode(values[0], type=dict[str, str])
    for rank, value in enumerate(values):
        if value == values[0]:
            continue
        other = msgspec.msgpack.decode(value, type=dict[str, str])
        for key in first | other:
            if first.get(key) != other.get(key):
                raise RanksDisagreeError(
                    f"ranks called with different {key}: {first.get(key, 'nothing')} on rank 0 but "
                    f"{other.get(key, 'nothing')} on rank {rank}. Call with the same arguments on every rank"
                )
    return b""
