"""The story of a save on one rank: prepare, agree, plan, write, commit."""

from __future__ import annotations

import logging
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from hyper_ckpt.agreement import Operation, names
from hyper_ckpt.api.common import attempt, brief, few
from hyper_ckpt.api.plans import plans_of
from hyper_ckpt.api.reporting import Reporter
from hyper_ckpt.api.views import metadata_of, own_metadata
from hyper_ckpt.api.writing import Part, Planned, Prepared, Report, SaveCall, Writer, Written, plan_digest
from hyper_ckpt.columns import Columns, Placed
from hyper_ckpt.description import World, with_base_load, without
from hyper_ckpt.engine import visible
from hyper_ckpt.engine.commit import Previous, discard_failed, look, publish, published_id, remove_leftovers
from hyper_ckpt.engine.save import WritePiece, write
from hyper_ckpt.errors import CheckpointError, ConflictError, PlanError, RankTimeoutError
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.manifest_writer import ManifestContent, encode_manifest
from hyper_ckpt.metadata import Metadata
from hyper_ckpt.planning.replicas import with_variants
from hyper_ckpt.planning.share import table_of
from hyper_ckpt.receipt import receipt_name
from hyper_ckpt.state import Node, decode_tree, encode_tree, groups_advice, keep_variants, merge, values_digest
from hyper_ckpt.state.walk import blob_owners, tensor_names
from hyper_ckpt.version import VERSION as LIBRARY_VERSION

T = TypeVar("T")

logger = logging.getLogger("hyper_ckpt")

_REMEDIES = (
    "If they are meant to differ, as experts do, give each a name of its own or wrap it in PerRank; if one rank's is "
    "enough, as of BatchNorm statistics, SaveOptions(conflicts='warn') stores the lowest rank's only"
)
_KEPT = {
    "keep": "the checkpoint keeps each rank's, and a load on other ranks will have to say whose it wants",
    "warn": "the checkpoint has only the lowest rank's",
}


class _Decision(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 tells all: the id, who stores which blob, what only it could know, and how many directories the save
    makes for the path."""

    save_id: str
    created: float
    blobs: list[tuple[str, int]]
    base_load: bytes
    loose: bool
    missing_folders: int


@dataclass(frozen=True, eq=False)
class BegunTogether:
    """A save that was agreed on: what to write, or why this rank cannot. See `writing.Begun`."""

    saving: Saving
    prepared: Prepared
    decision: _Decision
    ties: Mapping[str, str]
    planned: Planned | None
    error: BaseException | None

    def write(self, pieces: list[WritePiece] | None = None, writer: Writer = write) -> Written:
        if self.error is not None:
            raise self.error
        return self.saving.write(_known(self.planned), pieces, writer)

    def finish(self, write: Callable[[], Written]) -> Metadata:
        return self.saving.finish(self, write)


class Saving:
    """One save on one rank: `begin`, in the caller's thread, then what that returns."""

    def __init__(self, call: SaveCall, operation: Operation, reporter: Reporter) -> None:
        self.call, self.reporter, self._operation = call, reporter, operation
        self._ranks, self._part = call.platform.ranks, Part(call)
        self._previous = Previous(None, (), None)
        # What only rank 0 knows.
        self._tree: Node = None
        self._columns: Columns | None = None
        self._manifest: Manifest | None = None

    def begin(self, state: Mapping[Any, Any]) -> BegunTogether:
        """The first part, in the caller's thread: prepare, meet, exchange, decide, plan."""
        prepared, error = attempt(lambda: self._part.prepare(state))
        self._operation.meet(self.call.agreed_options(), error)
        assert prepared is not None
        exchanged, error = attempt(lambda: self._exchange(_known(prepared)))
        loose: list[Columns] = []
        data = self._operation.agree("planning", b"", error, lambda _: self._decide(*_known(exchanged), loose))
        world, _ = _known(exchanged)
        prepared = prepared.with_variants(world.groups, self._ranks.rank) if world.holders else prepared
        decision = msgspec.msgpack.decode(data, type=_Decision)
        planned = _planned(world, decision.base_load)
        parts = [c.pack() for c in loose[0].by_rank(self._ranks.world_size)] if decision.loose and loose else None
        own, error = attempt(
            lambda: self._plan(prepared, planned, self._ranks.scatter_bytes(parts) if decision.loose else b"", decision)
        )
        return BegunTogether(self, prepared, decision, planned.ties, own, error)

    def write(self, planned: Planned, pieces: list[WritePiece] | None, writer: Writer) -> Written:
        """Writes this rank's part; `pieces` are copies of those planned."""
        own = planned if pieces is None else replace(planned, pieces=pieces)
        return self._part.write(own, self.reporter, writer=writer)

    def finish(self, begun: BegunTogether, write: Callable[[], Written]) -> Metadata:
        """The last part, in any thread: write, agree, publish. No collective is used."""
        written: Written | None = None
        try:
            with self._operation.working():
                written, error = attempt(write)
                if written:
                    self.reporter.staged()
                report = written.report() if written else b""
                self._operation.agree("saving", report, error, lambda v: self._publish(v, begun), True)
        except BaseException as error:
            self._failed(error, written, begun.decision)
        assert written is not None
        self._report_late_ranks()
        total = sum(f.size for f in self._manifest.files) if self._manifest else 0
        self.reporter.finished("durable" if self.call.durable else "published", total)
        return self._metadata(written, begun)

    def _failed(self, error: BaseException, written: Written | None, decision: _Decision) -> None:
        """Returns if the checkpoint is published all the same, as a rank finds that gave up waiting for rank 0. Else
        removes what this rank wrote, unless rank 0 may still publish it, and raises."""
        store, save_id = self.call.store, decision.save_id
        if written is None or self._operation.settled:
            if written is not None:
                discard_failed(store, written.result.names, save_id)
            store.remove_folders(decision.missing_folders)
            raise error
        if not isinstance(error, Exception):
            raise error
        try:
            found = published_id(store)
        except CheckpointError:
            raise error from None
        if found != save_id:
            if isinstance(error, RankTimeoutError):
                text = f"{error}. The checkpoint was not published when looked at"
                raise RankTimeoutError(f"{text}; should rank 0 still publish it, it is whole", error.ranks) from error
            raise error
        logger.warning("%s is published, which this rank found when it looked: %s", store.url, error)

    def _report_late_ranks(self) -> None:
        """At rank 0: ranks that gave up waiting while the checkpoint was published look for it themselves."""
        late = self._operation.late_ranks
        if late:
            logger.warning(
                "%s is published, but %s gave up waiting for that: the save returned there if they saw it when they "
                "looked, else it raised RankTimeoutError. Raise timeout=",
                self.call.store.url,
                names(late),
            )

    def _exchange(self, prepared: Prepared) -> tuple[World, list[tuple[list[int], Node]]]:
        """What all ranks describe; and at rank 0, their trees. Collective.

        Raises:
            ConflictError: replicas differ, and that is refused, or cannot be kept. The same on every rank.
        """
        world = plans_of(self.call.platform).known(self._operation.exchange(prepared.description))
        trees = self._gather_trees(prepared)
        return (self._settled(world) if world.conflicts else world), trees

    def _settled(self, world: World) -> World:
        """What to save of replicas that differ. Says so on every rank."""
        table_of(world)  # raises where they are not even of one dtype and shape
        conflicts = self.call.options.conflicts
        names = few([*map(repr, sorted(world.conflicts))])
        irregular = sorted(name for name, groups in world.groups.items() if not groups)
        if conflicts == "error":
            raise ConflictError(f"ranks hold different tensors under {names}. {_REMEDIES}")
        if conflicts == "keep" and irregular:
            raise ConflictError(
                f"ranks hold different values of {few([*map(repr, irregular)])}, in parts that cannot be sorted into "
                f"whole replicas, so that they cannot all be kept. {_REMEDIES}"
            )
        text = f"ranks hold different tensors under {names}: {_KEPT[conflicts]}. {_REMEDIES}"
        warnings.warn(text, stacklevel=8)
        return with_variants(world) if conflicts == "keep" else world

    def _gather_trees(self, prepared: Prepared) -> list[tuple[list[int], Node]]:
        """At rank 0, the distinct trees with their ranks: one of each is sent."""
        if self._ranks.world_size == 1:
            return [([0], prepared.flat.tree)]
        kind = xxhash.xxh3_128_digest(prepared.description.structure.skeleton)
        digests = self._ranks.all_gather_object(values_digest(prepared.flat.tree) + kind)
        ranks_of: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(digests):
            ranks_of.setdefault(bytes(digest), []).append(rank)
        first = any(ranks[0] == self._ranks.rank for ranks in ranks_of.values())
        gathered = self._ranks.gather_bytes(encode_tree(prepared.flat.tree) if first else b"")
        if gathered is None:
            return []
        return [(ranks, decode_tree(gathered[ranks[0]])) for ranks in ranks_of.values()]

    def _decide(self, world: World, trees: list[tuple[list[int], Node]], loose: list[Columns]) -> bytes:
        """At rank 0: looks at the path, joins the states, and proves that what will be written is whole."""
        call = self.call
        self._previous = look(call.store, call.overwrite)
        merged, conflicts = merge(trees)
        self._report_conflicts([f"{c.name!r} on ranks {brief(c.ranks)}{groups_advice(c.name)}" for c in conflicts])
        self._tree = keep_variants(merged, world.groups) if world.holders else merged
        columns = call.planner.loose_plan(without(world, world.ties))
        loose.append(columns)
        load = np.bincount(columns.rank, columns.nbytes(), world.world_size).astype(np.int64).tobytes()
        planned = _planned(world, load)
        self._columns = self._plan_of(
            planned, None, bool(len(columns)), lambda: call.planner.build_global_plan(planned)
        )
        remove_leftovers(call.store, self._previous, call.options.leftover_age)
        missing = call.store.missing_folders()
        decision = _Decision(
            secrets.token_hex(8), time.time(), blob_owners(self._tree), load, bool(len(columns)), missing
        )
        return msgspec.msgpack.encode(decision)

    def _report_conflicts(self, found: list[str]) -> None:
        if not found:
            return
        text = f"ranks hold different values of {few(found)}"
        if self.call.options.conflicts == "error":
            raise ConflictError(f'{text}. Wrap values that belong to a rank in PerRank, or save with conflicts="keep"')
        warnings.warn(
            f"{text}: the checkpoint keeps each rank's value. Wrap values that belong to a rank in PerRank",
            stacklevel=9,
        )

    def _plan(self, prepared: Prepared, world: World, loose: bytes, decision: _Decision) -> Planned:
        """Plans this rank's share, as rank 0 does for all."""
        rank = self._ranks.rank

        def make() -> Columns:
            return self.call.planner.finalize_plan(world, Columns.unpack(table_of(world), loose), rank)

        columns = self._plan_of(world, rank, decision.loose, make)
        payloads = dict(prepared.flat.payloads)
        payloads |= {name: prepared.flat.blobs[name] for name, owner in decision.blobs if owner == rank}
        return self._part.plan(prepared, columns, decision.save_id, payloads, self.reporter)

    def _plan_of(self, world: World, rank: int | None, loose: bool, make: Callable[[], Columns]) -> Columns:
        """A plan, an earlier one if nothing has changed. Boxes that are listed one by one are in no world's key."""
        return make() if loose else plans_of(self.call.platform).get(self.call.planner, world, rank, make)

    def _publish(self, votes: list[bytes], begun: BegunTogether) -> bytes:
        """At rank 0, when all have written: compares what was written with the plan, and commits."""
        call, decision = self.call, begun.decision
        reports = [msgspec.msgpack.decode(v, type=Report) for v in votes]
        columns = self._columns
        assert columns is not None
        placed = call.writer.place(columns, decision.save_id)
        self._check_reports(reports, columns, placed)
        content = ManifestContent(
            decision.save_id,
            self._ranks.world_size,
            decision.created,
            LIBRARY_VERSION,
            [f for r in reports for f in r.files],
            [r.receipt for r in reports],
            encode_tree(self._tree),
            begun.prepared.user,
            tensor_names(self._tree),
            begun.ties,
        )
        data = encode_manifest(content, columns, placed)
        manifest = Manifest(data)
        # What this process wrote by itself it sees.
        patience = min(visible.LOOK_SECONDS, self._operation.remaining / 3) if len(votes) > 1 else 0.0
        visible.require_visible(call.store, _expected(reports, decision.save_id), patience, call.threads)
        late = self._operation.gave_up()
        if late:
            raise RankTimeoutError(f"{names(late)} gave up waiting before the checkpoint was published", late)
        publish(call.store, data, self._previous, decision.save_id, durable=call.durable, seconds=patience)
        self._manifest = manifest
        return b""

    def _check_reports(self, reports: list[Report], columns: Columns, placed: Placed) -> None:
        """What each rank wrote must be what rank 0 planned for it."""
        written = {f.name: f for r in reports for f in r.files}
        for name, rank in zip(placed.files, placed.file_rank.tolist(), strict=True):
            if name not in written or written[name].rank != rank:
                raise PlanError(f"rank {rank} was to write {name} but did not")
        for rank, (report, own) in enumerate(zip(reports, columns.by_rank(len(reports)), strict=True)):
            if plan_digest(own) != report.plan:
                raise PlanError(
                    f"rank {rank} planned its share otherwise than rank 0: do all ranks run the same version?"
                )

    def _metadata(self, written: Written, begun: BegunTogether) -> Metadata:
        decision = begun.decision
        if self._manifest is not None:
            return metadata_of(self._manifest, self._tree)
        facts = (decision.save_id, self._ranks.world_size, decision.created, self.call.user_metadata)
        files = list(written.result.receipt.files)
        return own_metadata(written.columns, written.placed, files, written.prepared.flat.tree, facts, begun.ties)


def _expected(reports: Sequence[Report], save_id: str) -> list[visible.Expected]:
    """What must be at the path: the data files and receipts of all ranks."""
    files = [visible.Expected(f.name, f.size, rank) for rank, report in enumerate(reports) for f in report.files]
    receipts = [visible.Expected(receipt_name(r, save_id), report.receipt_size, r) for r, report in enumerate(reports)]
    return files + receipts


def _known(value: T | None) -> T:
    """What was attempted, after all ranks agreed that it did not fail."""
    assert value is not None
    return value


def _planned(world: World, base_load: bytes) -> World:
    """The world that is planned: each tied memory once, and what ranks write of loose tensors counted."""
    return with_base_load(without(world, world.ties), np.frombuffer(base_load, np.int64))
