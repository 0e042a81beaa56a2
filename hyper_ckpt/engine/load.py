"""Reads what one rank wants, and passes on what several ranks want."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hyper_ckpt.box import IntArray, cut, offsets_inside, uncovered
from hyper_ckpt.columns import Columns, Located
from hyper_ckpt.contracts.platform import ByteBuffer, Carrier, Pending, Ranks, Stager
from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.engine.blocks import BlockRun, Piece
from hyper_ckpt.engine.budget import Budget
from hyper_ckpt.engine.cast import Cast
from hyper_ckpt.engine.pieces import SEGMENT_BYTES, SMALL_BYTES, PieceReader
from hyper_ckpt.engine.shared import SharedPart
from hyper_ckpt.engine.stage import settle
from hyper_ckpt.engine.stored import Stored
from hyper_ckpt.engine.targets import Target
from hyper_ckpt.engine.workers import Running, Task, run_all
from hyper_ckpt.errors import PlanError
from hyper_ckpt.receipt import BLOCK_BYTES

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class LoadJob:
    """Everything that `Loader` needs of one rank.

    Args:
        columns: wanted boxes: those this rank reads and those it receives, in canonical order.
        located: stored pieces for the rows that this rank reads.
        targets: by tensor name, the shards that the boxes lie in.
        batch_ready: waits until all ranks of a group have read a batch.
        batch_bytes: the same on all ranks; 0: each box by itself.
        progress: told of bytes read or received, by any thread.
        shares: reads are shared between ranks.
        fills: the targets are somebody's, and not made for this load.
    """

    ranks: Ranks
    stager: Stager
    stored: Stored
    store: ByteStore
    columns: Columns
    located: Located
    targets: dict[str, list[Target]]
    batch_ready: Callable[[str, Sequence[int]], None]
    batch_bytes: int
    threads: int
    max_host_bytes: int | None
    progress: Callable[[int], None]
    shares: bool
    fills: bool


@dataclass
class LoadCounts:
    """What a load moved, in bytes: `read` from the store, `received` from ranks, and the most host memory held; of
    shared reads, the boxes, the messages, and the boxes that travelled with others."""

    read: int = 0
    received: int = 0
    peak_host_bytes: int = 0
    shared_boxes: int = 0
    broadcasts: int = 0
    packed_boxes: int = 0


class Loader:
    """Runs one rank's load plan."""

    def __init__(self, job: LoadJob, default_host_bytes: int) -> None:
        self.job = job
        self.counts, self.shares = LoadCounts(), job.shares
        self.nbytes = job.columns.nbytes()
        order = np.argsort(job.located.want, kind="stable")
        self._handles: list[Any] = []
        self._held: dict[int, tuple[ByteBuffer, int]] = {}
        self._broadcasting = False
        self._reading: list[Running] = []
        self._located_order = order
        self._located_want = job.located.want[order]
        self._places = [*self._find_all()]
        self._count_rows()
        self._batches = list(self._shared_batches())
        largest = max((t.room for ts in job.targets.values() for t in ts if t.memory is None), default=0)
        scratch = SEGMENT_BYTES + 3 * BLOCK_BYTES
        need = max(2 * largest, self._shared_bytes(1)) + 3 * BLOCK_BYTES
        limit = max(default_host_bytes, need + scratch) if job.max_host_bytes is None else job.max_host_bytes
        self.budget = Budget(limit)
        self.budget.require(need, f"a load with shards of {largest} bytes that are staged")
        self._scratch = min(scratch, limit - need + 3 * BLOCK_BYTES)
        self._reads_ahead = max(2 * largest, self._shared_bytes(2)) + self._scratch <= limit
        self._staging_limit = max(limit - self._scratch - 3 * BLOCK_BYTES, largest)
        self._reader = PieceReader(job.store, job.stager, self.budget, self._scratch, job.progress, job.fills)

    def _count_rows(self) -> None:
        """Counts the boxes of every target, and finds the staged ones that are filled only in part."""
        rows_of: dict[int, list[int]] = {}
        for row, (target, _) in enumerate(self._places):
            target.remaining += 1
            if target.memory is None:
                rows_of.setdefault(id(target), []).append(row)
        for rows in rows_of.values():
            target = self._target(rows[0])
            target.keeps = self.nbytes[rows[0]] != target.nbytes and not self._fills(rows, target)
            if isinstance(target.shard.data, Cast):
                self._check_cast(rows, target)

    def _check_cast(self, rows: list[int], target: Target) -> None:
        """What a shard has cannot be staged as another dtype without loss: it must be filled whole, at one go."""
        shared = self.job.columns.group[rows] >= 0
        if target.keeps or not (shared.all() or len(rows) == 1):
            raise PlanError(
                f"the planner fills only a part of {target.name!r} at once, which is cast from {target.dtype}: fill "
                "all of it, or load it without cast"
            )

    def _fills(self, rows: list[int], target: Target) -> bool:
        """Whether wanted boxes fill a shard exactly once."""
        d, columns = len(target.sizes), self.job.columns
        offsets, whole = columns.offsets[rows], np.ones((1, columns.offsets.shape[1]), np.int64)
        offsets[:, :d] -= np.array(target.offsets, np.int64)
        whole[0, :d] = target.sizes
        return not len(uncovered(np.zeros(len(rows), np.int64), offsets, columns.sizes[rows], whole))

    def _shared_bytes(self, count: int) -> int:
        """The most bytes of buffers that are held while shared boxes are read, `count` batches at a time: for staged
        shards, from the first batch that fills a part of one to the last, and for messages."""
        batches = [[self._target(row) for row in members] for _, _, members in self._batches]
        last = {id(t): n for n, targets in enumerate(batches) for t in targets if t.memory is None}
        messages = [int(self.nbytes[members].sum()) for _, _, members in self._batches]
        if not last:
            return max((sum(messages[max(n - count + 1, 0) : n + 1]) for n in range(len(messages))), default=0)
        opened: dict[int, int] = {}
        most = 0
        for n, targets in enumerate(batches):
            begun = max(n - count + 1, 0)  # whose buffers are still held when this one opens
            opened |= {id(t): t.room for t in targets if t.memory is None}
            opened = {key: nbytes for key, nbytes in opened.items() if last[key] >= begun}
            most = max(most, sum(opened.values()) + sum(messages[begun : n + 1]))
        return most

    def verify_first(self) -> None:
        """Checks every block that will be read, before any target is touched."""
        located, reader = self.job.located, dataclasses.replace(self._reader, fills=False)
        tasks: list[Task] = []
        for i in range(len(located)):
            piece, shape, offsets, sizes, itemsize = self._piece(i)
            tasks += reader.verify_tasks(piece, shape, offsets, sizes, itemsize)
        with self.job.store.reading():
            run_all(tasks, self.job.threads)

    def open_groups(self) -> None:
        """Makes the groups of ranks that share reads. Collective: before `run`, so that no rank waits in it for
        another one that reads, or has failed to."""
        if self.job.columns.groups:
            self._handles = self.job.ranks.groups(self.job.columns.groups)

    def run(self) -> None:
        """Fills every target."""
        try:
            with self.job.store.reading():
                self._run()
        except BaseException:
            for reading in self._reading:
                reading.stop()
            self._give_back()
            raise
        self.counts.peak_host_bytes = self.budget.peak

    def _run(self) -> None:
        self._run_shared()
        # What nobody waits for comes last.
        alone = np.flatnonzero(self.job.columns.group < 0).tolist()
        direct = [r for r in alone if not self._target(r).staged]
        run_all(self.all_tasks([(r, self._in_place(r)) for r in direct]), self.job.threads)
        for rows in self._staging_batches([r for r in alone if self._target(r).staged]):
            self._open(rows)
            run_all(self.all_tasks([(r, self.destination(r)) for r in rows]), self.job.threads)
            self._close(rows)
            self._set_aside(rows)

    def take(self, nbytes: int) -> ByteBuffer:
        """A buffer of the pool, counted; given back by `give`, or when the load fails."""
        self.budget.acquire(nbytes)
        buffer = self.job.stager.buffer(nbytes)
        self._held[id(buffer)] = (buffer, nbytes)
        return buffer

    def give(self, buffer: ByteBuffer) -> None:
        """Takes a buffer back."""
        _, nbytes = self._held.pop(id(buffer))
        self.job.stager.release(buffer)
        self.budget.release(nbytes)

    def _give_back(self) -> None:
        """After a failure: what is held goes back to the pool, unless a broadcast may still write into it."""
        if not self._broadcasting:
            for buffer, _ in list(self._held.values()):
                self.give(buffer)

    def _run_shared(self) -> None:
        """Reads batches and passes them on; where memory allows it, the next is read while one is passed on."""
        last = {id(self._target(row)): n for n, (_, _, members) in enumerate(self._batches) for row in members}
        ahead: list[SharedPart] | None = None
        for n, (number, batch, members) in enumerate(self._batches):
            parts, ahead = self._read_batch(n) if ahead is None else ahead, None
            self._reading[n].wait()
            if n + 1 < len(self._batches) and self._reads_ahead:
                ahead = self._read_batch(n + 1)
            # A rank enters the broadcasts only when every rank of the group has read its part.
            self.job.batch_ready(f"{number}/{batch}", self.job.columns.groups[number])
            self._broadcasting = True
            for part in parts:
                part.exchange(self._handles[number])
            self._broadcasting = False
            self._close(members)
            # What only private reads complete is copied in for now: it holds no buffer until then.
            self._set_aside([row for row in members if last[id(self._target(row))] == n])

    def _read_batch(self, n: int) -> list[SharedPart]:
        """Starts to read this rank's part of a batch."""
        number, _, members = self._batches[n]
        self._open(members)
        parts = [SharedPart(self, reader, members) for reader in self.job.columns.groups[number]]
        own = [t for p in parts if p.reader == self.job.ranks.rank for t in p.tasks()]
        # Noted before it begins: whatever fails, it is stopped before its buffers are given back.
        self._reading.append(Running(own, self.job.threads))
        self._reading[n].start()
        return parts

    def _shared_batches(self) -> Iterator[tuple[int, int, list[int]]]:
        """Number of the group, number of the batch in it, rows: what is read and passed on at once, in this order."""
        columns = self.job.columns
        for number in np.unique(columns.group[columns.group >= 0]).tolist():
            rows = np.flatnonzero(columns.group == number)
            for batch, members in enumerate(_batches(self.nbytes, rows, self.job.batch_bytes)):
                yield number, batch, members

    def _staging_batches(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Rows into staged shards, in batches whose buffers fit the budget."""
        batch: list[int] = []
        open_targets: set[int] = set()
        held = 0
        for row in rows:
            target = self._target(row)
            new = id(target) not in open_targets
            if new and batch and held + target.room > self._staging_limit:
                yield batch
                batch, open_targets, held = [], set(), 0
            held += target.room if new else 0
            open_targets.add(id(target))
            batch.append(row)
        if batch:
            yield batch

    def _open(self, rows: Sequence[int]) -> None:
        kept: list[tuple[Target, ByteBuffer]] = []
        for row in rows:
            target = self._target(row)
            if target.memory is None:
                target.staging = self.take(target.room)
                flat = target.staging[: target.nbytes].view(dtype_of(target.dtype).carrier)
                target.memory = flat.reshape(target.sizes)
                if target.keeps:
                    kept.append((target, target.staging))
        self._copy(self.job.stager.copy_out(target.shard, buffer) for target, buffer in kept)

    def _close(self, rows: Sequence[int]) -> None:
        """Copies in the shards of which every box has been filled."""
        for row in rows:
            self._target(row).remaining -= 1
        self._copy_in(t for t in self._staged(rows) if t.remaining == 0)

    def _set_aside(self, rows: Sequence[int]) -> None:
        """Copies in the shards of which other boxes are filled later: their buffers might be wanted before that."""
        for target in (unfinished := self._staged(rows)):
            target.keeps = True
        self._copy_in(unfinished)

    def _staged(self, rows: Sequence[int]) -> list[Target]:
        """The shards of some rows that have a buffer now."""
        targets = {id(t): t for t in (self._target(row) for row in rows) if t.staging is not None}
        return list(targets.values())

    def _copy_in(self, targets: Iterable[Target]) -> None:
        """Copies buffers into their shards, and gives them back."""
        filled = [(target, target.staging) for target in targets if target.staging is not None]
        self._copy(self.job.stager.copy_in(buffer, target.shard) for target, buffer in filled)
        for target, buffer in filled:
            self.give(buffer)
            target.memory, target.staging = None, None

    def _copy(self, copies: Iterable[Pending]) -> None:
        """Starts copies, then waits for all of them, also where one fails."""
        started: list[Pending] = []
        try:
            started.extend(copies)
            for pending in started:
                pending.wait()
        except BaseException:
            settle(started)
            raise

    def _target(self, row: int) -> Target:
        """The target that a wanted box lies in."""
        return self._places[row][0]

    def _find_all(self) -> Iterator[tuple[Target, tuple[int, ...] | None]]:
        """For each wanted box the target that it lies in, and its offsets inside that; None where it is all of it."""
        columns, table = self.job.columns, self.job.columns.table
        shapes = table.padded_shapes()[columns.tensor]
        whole = (columns.offsets == 0).all(axis=1) & (columns.sizes == shapes).all(axis=1)
        for row, (number, is_whole) in enumerate(zip(columns.tensor.tolist(), whole.tolist(), strict=True)):
            targets = self.job.targets[table.names[number]]
            # Told without looking at boxes one by one: mostly all are so.
            alike = is_whole and targets and targets[0].sizes == table.shapes[number]
            yield (targets[0], None) if alike else self._find(row, targets)

    def _find(self, row: int, targets: Sequence[Target]) -> tuple[Target, tuple[int, ...] | None]:
        offsets, sizes = self._box(row)
        for target in targets:
            if target.sizes == sizes and target.offsets == offsets:
                return target, None
            low = offsets_inside(offsets, sizes, target.offsets, target.sizes)
            if low is not None:
                return target, low
        name = self.job.columns.table.names[int(self.job.columns.tensor[row])]
        raise PlanError(f"the plan wants {name!r} at {offsets}, which this rank does not hold")

    def destination(self, row: int) -> Carrier:
        """The memory of a wanted box."""
        target, low = self._places[row]
        return target.view if low is None else cut(target.view, low, self._box(row)[1])

    def _in_place(self, row: int) -> Carrier | int:
        """The memory of a wanted box that is filled where it lies. Small pieces make no array of each plain tensor that
        they fill: its address is enough."""
        target, low = self._places[row]
        small = low is None and row in self._small_whole
        return target.memory if small and isinstance(target.memory, int) else self.destination(row)

    def _box(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of a wanted box."""
        return self.job.columns.boxes()[row]

    def _piece(self, i: int) -> tuple[Piece, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        located, columns = self.job.located, self.job.columns
        number = int(columns.tensor[located.want[i]])
        d = len(columns.table.shapes[number])
        shape = tuple(located.piece_sizes[i, :d].tolist())
        offsets = tuple((located.offsets[i, :d] - located.piece_offsets[i, :d]).tolist())
        sizes = tuple(located.sizes[i, :d].tolist())
        itemsize = columns.table.dtype(number).itemsize
        name, nbytes = columns.table.names[number], math.prod(shape) * itemsize
        piece = self.job.stored.piece(name, int(located.file[i]), int(located.start[i]), nbytes)
        return piece, shape, offsets, sizes, itemsize

    def all_tasks(self, wanted: Sequence[tuple[int, Carrier | int]]) -> Iterator[Task]:
        """Tasks that fill wanted boxes, given with their memory. Small pieces wanted whole are read together."""
        small: list[int] = []
        targets: list[Carrier | int] = []
        whole: list[BlockRun] = []
        for row, destination in wanted:
            if isinstance(destination, int) or row in self._small_whole:
                small.append(self._small_whole[row])
                targets.append(destination)
            else:
                yield from self._read_tasks(row, destination, whole)
        yield from self._small_tasks(small, targets)
        yield from self._reader.block_tasks(whole, self.job.threads)

    def _small_tasks(self, small: Sequence[int], targets: Sequence[Carrier | int]) -> Iterator[Task]:
        """Tasks that fill targets with small pieces, given as rows of what was located; file by file."""
        if not small:
            return
        job, located = self.job, np.array(small)
        order = np.lexsort((job.located.start[located], job.located.file[located]))
        for part in np.split(order, np.flatnonzero(np.diff(job.located.file[located][order])) + 1):
            rows = located[part]
            numbers, sizes = job.columns.tensor[job.located.want[rows]], self.nbytes[job.located.want[rows]]
            names = [job.columns.table.names[number] for number in numbers.tolist()]
            self.counts.read += int(sizes.sum())
            pieces = job.stored.small_pieces(names, int(job.located.file[rows[0]]), job.located.start[rows], sizes)
            yield from self._reader.small_tasks(pieces, [targets[n] for n in part.tolist()])

    @functools.cached_property
    def _small_whole(self) -> dict[int, int]:
        """The wanted rows that are one small stored piece, whole, and where in `located` that is."""
        located = self.job.located
        times = np.bincount(located.want, minlength=len(self.job.columns))
        same = (located.piece_sizes == located.sizes).all(axis=1) & (times[located.want] == 1)
        i = np.flatnonzero(same & (self.nbytes[located.want] <= SMALL_BYTES))
        return dict(zip(located.want[i].tolist(), i.tolist(), strict=True))

    def _read_tasks(self, row: int, destination: Carrier, whole: list[BlockRun]) -> Iterator[Task]:
        """Tasks that fill a wanted box from the stored pieces; whole blocks are added to `whole`."""
        low, high = np.searchsorted(self._located_want, [row, row + 1])
        base = self._box(row)[0]
        for i in self._located_order[low:high].tolist():
            piece, shape, offsets, sizes, itemsize = self._piece(i)
            at = self.job.located.offsets[i, : len(base)].tolist()
            part = cut(destination, [a - b for a, b in zip(at, base, strict=True)], sizes)
            self.counts.read += math.prod(sizes) * itemsize
            yield from self._reader.tasks(piece, shape, offsets, sizes, part, whole)


def _batches(nbytes: IntArray, rows: Rows, limit: int) -> Iterator[list[int]]:
    """Consecutive rows of about `limit` bytes, or each by itself; the same on every rank of the group."""
    number = np.cumsum(nbytes[rows]) // limit if limit else np.arange(len(rows))
    for part in np.split(rows, np.flatnonzero(np.diff(number)) + 1):
        yield part.tolist()
