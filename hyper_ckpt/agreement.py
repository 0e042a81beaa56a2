"""What all ranks agree on: that they are all here, what they described, and whose error stops everybody.

Run on every rank. A step ends with one value everywhere, or with the same error everywhere.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from hyper_ckpt import errors
from hyper_ckpt.box import IntArray
from hyper_ckpt.contracts.platform import ByteBuffer, Ranks
from hyper_ckpt.description import (
    EXPLICIT,
    Description,
    ExplicitBoxes,
    LayoutRecord,
    RankPart,
    Structure,
    TensorRecord,
    World,
    unpack_ranks,
)
from hyper_ckpt.errors import CheckpointError, RankFailedError, RanksDisagreeError, RankTimeoutError, StateMismatchError
from hyper_ckpt.layout import expand

MAX_ERROR_TEXT = 4096
MAX_RANKS_NAMED = 3
PARTING_SECONDS = 5.0
"""How long rank 0 stays at the end of an operation for ranks that do not say that they heard how it ended."""
_FIRST_POLL, _LAST_POLL = 0.0002, 0.05
"""Seconds between looks into the mailbox: each a little longer, so that a long wait costs nothing, a short one little."""


class StoppedError(CheckpointError):
    """Another rank failed; not for users: `Operation.agree` raises the reason."""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """How a step ended for everybody: a value, or an error with its class, message and ranks."""

    value: bytes = b""
    error: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()


class _Vote(msgspec.Struct, frozen=True, array_like=True):
    value: bytes = b""
    error: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()


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
    _steps: int = field(init=False, default=0)
    settled: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
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
        if self.ranks.world_size == 1:
            if error is not None:
                raise error
            return decide([value]) if decide else b""
        self.settled = False
        mailbox, rank = self.ranks.mailbox, self.ranks.rank
        mailbox.set(f"{key}/{rank}", msgspec.msgpack.encode(_Vote(value) if error is None else _vote(error)))
        if rank == 0:
            verdict, error = self._lead(key, step, error, decide)
        elif _is_interrupt(error):
            verdict = Verdict()
            mailbox.set(f"{key}/heard/{rank}", b"1")  # nobody needs to stay for it
        else:
            verdict = self._wait(key, step)
        if error is not None and _is_interrupt(error):
            # The others know now, and this process has other things to do than to wait for them.
            raise error
        if last or verdict.error:
            self._part(key, verdict)
        if verdict.error:
            raise _rebuild(verdict, error) from error
        if self._steps == 1:
            # Ranks may come up to a timeout apart. From here on their clocks run together.
            self._deadline = self._decided + self.timeout
        return verdict.value

    def _part(self, key: str, verdict: Verdict) -> None:
        """Keeps rank 0, whose process may host the mailbox, until the others have heard how the operation ended."""
        mailbox = self.ranks.mailbox
        if self.ranks.rank != 0:
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
                raise RankTimeoutError(f"reading: {_names(silent)} did not answer within {self.timeout:g} s", silent)
            if silent:
                pause = _sleep(pause)
        if rank == group[0]:
            for r in group[1:]:
                mailbox.delete(f"{key}/{r}")
            mailbox.set(key, b"1")

    def _lead(
        self, key: str, step: str, error: BaseException | None, decide: Decide | None
    ) -> tuple[Verdict, BaseException | None]:
        """At rank 0: counts, decides and tells. Returns the verdict, and the error that this rank itself met."""
        votes = self._count(key)
        self._decided = time.monotonic()
        silent = tuple(r for r in range(self.ranks.world_size) if r not in votes)
        bad = {r: v for r, v in sorted(votes.items()) if v.error}
        verdict = Verdict()
        if bad:
            verdict = _report(step, bad)
        elif silent:
            message = (
                f"{step}: {_names(silent)} did not answer within {self.timeout:g} s. Look at their logs: they may "
                "have died, hang, or never called; raise timeout= if they are only slow"
            )
            verdict = Verdict(error="RankTimeoutError", message=message, ranks=silent)
        elif decide is not None:
            try:
                verdict = Verdict(decide([votes[r].value for r in range(self.ranks.world_size)]))
            except BaseException as own:  # also an interrupt: the others must not wait for the deadline
                verdict, error = _report(step, {0: _vote(own)}), own
        self.ranks.mailbox.set(key, msgspec.msgpack.encode(verdict))
        self.settled = True
        if not silent:
            # Everybody who voted now has read the verdict before; one that has not may still look for it.
            self.ranks.mailbox.delete(f"hyper-ckpt/{self.number}/{self._steps - 2}")
        return verdict, error

    def _count(self, key: str) -> dict[int, _Vote]:
        """The votes: everybody's, or those until one was an error or the time was up."""
        mailbox, votes = self.ranks.mailbox, dict[int, _Vote]()
        pause = _FIRST_POLL
        while len(votes) < self.ranks.world_size:
            before = len(votes)
            for rank in range(self.ranks.world_size):
                data = None if rank in votes else mailbox.get(f"{key}/{rank}")
                if data is not None:
                    votes[rank] = msgspec.msgpack.decode(data, type=_Vote)
                    mailbox.delete(f"{key}/{rank}")
            # Who failed is known: the others are told at once, however long they would still work.
            if any(v.error for v in votes.values()):
                return votes
            if len(votes) == before and time.monotonic() > self._deadline:
                return votes
            pause = _sleep(pause) if len(votes) == before else _FIRST_POLL
        if time.monotonic() > self._deadline:
            # This rank was late itself: whoever gave up waiting for it has voted again.
            again = {r: mailbox.get(f"{key}/{r}") for r in votes}
            votes |= {r: msgspec.msgpack.decode(data, type=_Vote) for r, data in again.items() if data is not None}
        return votes

    def _wait(self, key: str, step: str) -> Verdict:
        mailbox, pause = self.ranks.mailbox, _FIRST_POLL
        # Rank 0 waits until the deadline itself: give its verdict time to arrive.
        limit = self._deadline + 1.0 + 0.05 * self.timeout
        while (data := mailbox.get(key)) is None and time.monotonic() < limit:
            pause = _sleep(pause)
        given_up = Verdict(
            error="RankTimeoutError",
            message=f"{step}: rank 0 did not answer within {self.timeout:g} s. Look at its log: it may have died, "
            "hang, or never have called; raise timeout= if it is only slow",
            ranks=(0,),
        )
        if data is None:
            # Should it come after all, it must not go on without this rank; but it may have decided just now.
            late = _Vote(error=given_up.error, message=given_up.message, ranks=given_up.ranks)
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
        sendable = {key: _printable(value) for key, value in options.items()}
        self.agree("meeting", msgspec.msgpack.encode(sendable), error, _same_options)

    def exchange(self, description: Description) -> World:
        """What all ranks described. Collective; call only after `meet`.

        Explicit boxes are known to rank 0 only. Replicas whose fingerprints differ are in `conflicts`.
        """
        return _Exchange(self.ranks, description).run()


def _sleep(pause: float) -> float:
    time.sleep(pause)
    return min(pause * 1.1, _LAST_POLL)


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether it ends the process, like Ctrl-C, and must not become an error that somebody catches."""
    return error is not None and not isinstance(error, Exception)


def _vote(error: BaseException) -> _Vote:
    name, text = type(error).__name__, _printable(str(error))
    if _class_of(name) is type(error):
        return _Vote(error=name, message=text[:MAX_ERROR_TEXT], ranks=getattr(error, "ranks", ()))
    return _Vote(error="RankFailedError", message=f"{name}: {text}"[:MAX_ERROR_TEXT])


def _printable(text: str) -> str:
    """With an escape for every lone surrogate, e.g. of a path that is not UTF-8: they cannot be sent."""
    return text.encode(errors="backslashreplace").decode()


def _report(step: str, bad: dict[int, _Vote]) -> Verdict:
    """The report of the first failing ranks; its class is the first one's."""
    shown = list(bad.items())[:MAX_RANKS_NAMED]
    messages = list(dict.fromkeys(v.message for _, v in shown))
    if len(messages) == 1:
        text = f"{_names(list(bad))}: {messages[0]}"
    else:
        text = "; ".join(f"rank {r}: {v.message}" for r, v in shown)
        text += f"; and {len(bad) - len(shown)} more ranks" if len(bad) > len(shown) else ""
    first = shown[0][1]
    return Verdict(error=first.error, message=f"{step}: {text}", ranks=first.ranks or tuple(bad))


def _class_of(name: str) -> type[Exception]:
    """The class that an error of this name has on every rank: itself if users know it, else RankFailedError."""
    kind: Any = {"ValueError": ValueError, "TypeError": TypeError}.get(name) or getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RankFailedError


def _rebuild(verdict: Verdict, own: BaseException | None) -> Exception:
    kind = _class_of(verdict.error)
    if issubclass(kind, RankFailedError | RankTimeoutError):
        return kind(verdict.message, verdict.ranks)
    if issubclass(kind, StateMismatchError):
        return kind(verdict.message, own.problems if isinstance(own, StateMismatchError) else ())
    return kind(verdict.message)


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


class _Facts(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 condenses of all rank parts: meshes by structure and number, ties, and what to compare."""

    meshes: list[list[list[list[int]]]]
    ties: dict[str, str]
    compare: bool


@dataclass(eq=False)
class _Exchange:
    ranks: Ranks
    description: Description
    _structures: tuple[Structure, ...] = ()

    def run(self) -> World:
        structure = msgspec.msgpack.encode(self.description.structure)
        record = self.description.digest + len(structure).to_bytes(8, "little")
        records = [bytes(r) for r in self.ranks.all_gather_object(record)]
        digests = list(dict.fromkeys(r[:16] for r in records))
        class_of = np.array([digests.index(r[:16]) for r in records], np.int64)
        firsts = [int(np.flatnonzero(class_of == c)[0]) for c in range(len(digests))]
        sizes = [int.from_bytes(records[r][16:], "little") for r in firsts]
        self._structures = self._broadcast_structures(structure, firsts, sizes)
        parts = self.ranks.gather_bytes(msgspec.msgpack.encode(self.description.rank_part))
        boxes = ExplicitBoxes()

        def condense() -> bytes:
            nonlocal boxes
            decoded = [msgspec.msgpack.decode(p, type=RankPart) for p in parts or ()]
            boxes = self._boxes(decoded, class_of)
            meshes = self._meshes(decoded, class_of)
            facts = _Facts(
                [[m.tolist() for m in row] for row in meshes],
                self._common_ties(decoded, class_of),
                self._suspicious(decoded, class_of),
            )
            return msgspec.msgpack.encode(facts)

        facts = msgspec.msgpack.decode(self._told(condense), type=_Facts)
        arrays = tuple(tuple(np.array(m, np.int64) for m in row) for row in facts.meshes)
        world = World(self.ranks.world_size, self._structures, class_of, arrays, boxes, facts.ties)
        return self._with_conflicts(world) if facts.compare else world

    def _told(self, compute: Callable[[], bytes]) -> bytes:
        """What rank 0 computes, on every rank; if that fails, its error."""
        data, cause = b"", None
        if self.ranks.rank == 0:
            try:
                verdict = Verdict(compute())
            except Exception as error:
                verdict, cause = _report("comparing what ranks described", {0: _vote(error)}), error
            data = msgspec.msgpack.encode(verdict)
        verdict = msgspec.msgpack.decode(broadcast_bytes(self.ranks, data), type=Verdict)
        if verdict.error:
            raise _rebuild(verdict, None) from cause
        return verdict.value

    def _broadcast_structures(self, own: bytes, firsts: list[int], sizes: list[int]) -> tuple[Structure, ...]:
        buffers = []
        for src, size in zip(firsts, sizes, strict=True):
            buffer: ByteBuffer = np.empty(size, np.uint8)
            if src == self.ranks.rank:
                buffer[:] = np.frombuffer(own, np.uint8)
            self.ranks.broadcast_into([buffer], src).wait()
            buffers.append(buffer)
        return tuple(msgspec.msgpack.decode(b.data, type=Structure) for b in buffers)

    def _meshes(self, parts: list[RankPart], class_of: IntArray) -> list[list[IntArray]]:
        """Per structure and mesh number, the distinct meshes: (meshes, mesh size)."""
        out = []
        for number, structure in enumerate(self._structures):
            shapes = {x.mesh: x.mesh_shape for x in structure.layouts if x.mesh >= 0}
            members = [parts[r] for r in np.flatnonzero(class_of == number)]
            row = []
            for mesh in range(len(shapes)):
                packed = sorted({part.meshes[mesh] for part in members})
                row.append(np.stack([unpack_ranks(p, shapes[mesh]) for p in packed]))
            out.append(row)
        return out

    def _boxes(self, parts: list[RankPart], class_of: IntArray) -> ExplicitBoxes:
        names, ranks, offsets, sizes = [], [], [], []
        for rank, part in enumerate(parts):
            tensors = self._structures[class_of[rank]].tensors
            for number, o, s in part.boxes:
                names.append(tensors[number].name)
                ranks.append(rank)
                offsets.append(o)
                sizes.append(s)
        return ExplicitBoxes(tuple(names), np.array(ranks, np.int64), tuple(offsets), tuple(sizes))

    def _common_ties(self, parts: list[RankPart], class_of: IntArray) -> dict[str, str]:
        """Ties on which every rank that holds any element of the tensor agrees."""
        said: dict[str, set[str]] = {}
        for part in parts:
            for name, first in part.ties:
                said.setdefault(name, set()).add(first)
        if not said:
            return {}
        names = [{t.name for t in structure.tensors} for structure in self._structures]
        for rank, part in enumerate(parts):
            silent = said.keys() & names[class_of[rank]] - dict(part.ties).keys() - set(part.empty)
            for name in silent:
                said[name].add("")
        return {name: firsts.pop() for name, firsts in said.items() if len(firsts) == 1}

    def _suspicious(self, parts: list[RankPart], class_of: IntArray) -> bool:
        """Whether fingerprints must be compared tensor by tensor."""
        if any(part.boxes for part in parts):
            return True
        seen: dict[tuple[int, ...], bytes] = {}
        for rank, part in enumerate(parts):
            structure = self._structures[class_of[rank]]
            for mesh, dims, digest in part.fingerprints:
                key = (int(class_of[rank]), mesh, *_cell(structure, part, mesh, dims, rank))
                if seen.setdefault(key, digest) != digest:
                    return True
        # Structures that share names may hold replicas of each other.
        names = [t.name for structure in self._structures for t in structure.tensors]
        return len(set(names)) != len(names)

    def _with_conflicts(self, world: World) -> World:
        """Compares fingerprints tensor by tensor, at rank 0, and tells all which differ."""
        own = msgspec.msgpack.encode((self.description.fingerprints, self.description.rank_part))
        gathered = self.ranks.gather_bytes(own)

        def compare() -> bytes:
            rows = [msgspec.msgpack.decode(g, type=tuple[tuple[bytes, ...], RankPart]) for g in gathered or ()]
            return msgspec.msgpack.encode(sorted(self._conflicts(rows, world)))

        names = msgspec.msgpack.decode(self._told(compare), type=list[str])
        return dataclasses.replace(world, conflicts=frozenset(names))

    def _conflicts(self, rows: list[tuple[tuple[bytes, ...], RankPart]], world: World) -> set[str]:
        seen: dict[tuple[object, ...], bytes] = {}
        out = set()
        several = _laid_differently(world)
        for rank, (prints, part) in enumerate(rows):
            structure = world.structures[world.class_of[rank]]
            listed: dict[int, list[Box]] = {}
            for number, offsets, sizes in sorted(part.boxes):
                if 0 not in sizes:
                    listed.setdefault(number, []).append((offsets, sizes))
            for number, (record, fingerprint) in enumerate(zip(structure.tensors, prints, strict=True)):
                layout = structure.layouts[record.layout]
                cells: list[Any] = listed.get(number, [])
                if layout.mesh != EXPLICIT and fingerprint:
                    cells = (
                        _boxes_of(record, layout, part, rank)
                        if record.name in several
                        else [_cell(structure, part, layout.mesh, layout.sharded_dims(), rank)]
                    )
                for i, cell in enumerate(cells):
                    own = fingerprint[8 * i : 8 * i + 8]
                    if own and seen.setdefault((record.name, cell), own) != own:
                        out.add(record.name)
        return out


Box = tuple[tuple[int, ...], tuple[int, ...]]


def _laid_differently(world: World) -> set[str]:
    """Names that ranks describe with different layouts: only their boxes can be compared."""
    found: dict[str, set[tuple[object, ...]]] = {}
    for structure in world.structures:
        for record in structure.tensors:
            x = structure.layouts[record.layout]
            found.setdefault(record.name, set()).add((min(x.mesh, 0), x.mesh_shape, x.placements, x.order))
    return {name for name, layouts in found.items() if len(layouts) > 1}


def _boxes_of(record: TensorRecord, layout: LayoutRecord, part: RankPart, rank: int) -> list[Box]:
    """The box that a rank holds of a tensor that is whole or on a mesh; none if it is empty."""
    offsets, sizes = (0,) * len(record.shape), record.shape
    if layout.mesh >= 0:
        at = np.flatnonzero(unpack_ranks(part.meshes[layout.mesh], layout.mesh_shape) == rank)
        if not len(at):
            return []
        coordinate = np.array(np.unravel_index(int(at[0]), layout.mesh_shape), np.int64).reshape(-1, 1)
        low, lengths = expand(record.shape, layout.mesh_shape, layout.decoded(), layout.order, coordinate)
        offsets, sizes = tuple(low[0].tolist()), tuple(lengths[0].tolist())
    return [] if 0 in sizes else [(offsets, sizes)]


def _cell(structure: Structure, part: RankPart, mesh: int, dims: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """What tells sets of holders apart: the coordinates along the sharded mesh dimensions."""
    if mesh < 0:
        return ()
    shape = next(x.mesh_shape for x in structure.layouts if x.mesh == mesh)
    at = np.flatnonzero(unpack_ranks(part.meshes[mesh], shape) == rank)
    if not len(at):
        return (-1, rank)
    coordinate = np.unravel_index(int(at[0]), shape)
    return (*dims, *(int(coordinate[d]) for d in dims))


def broadcast_bytes(ranks: Ranks, data: bytes) -> bytes:
    """Rank 0's bytes, of any length, on every rank."""
    length: ByteBuffer = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8).copy()
    ranks.broadcast_into([length], 0).wait()
    buffer: ByteBuffer = np.empty(int.from_bytes(length.tobytes(), "little"), np.uint8)
    if ranks.rank == 0:
        buffer[:] = np.frombuffer(data, np.uint8)
    ranks.broadcast_into([buffer], 0).wait()
    return buffer.tobytes()
